"""What the routes of one server work with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from paceline.core.protocols import Engine
from paceline.core.types import Request, RequestOutput
from paceline.serve.auth import NO_KEY
from paceline.serve.beam_search import BeamSearch
from paceline.serve.config import ServerConfig
from paceline.serve.engine_readings import EngineSource
from paceline.serve.extra_fields import ExtraFields
from paceline.serve.fair_queue import FairQueue
from paceline.serve.limits import AdmissionControl
from paceline.serve.logprob_format import TokenFormatter
from paceline.serve.metrics import Metrics
from paceline.serve.requests import CompletionTask, RequestBuilder
from paceline.serve.responses import ChoiceDelta
from paceline.serve.sequence_metrics import SequenceObserver
from paceline.serve.streaming import Observer, merge_outputs
from paceline.serve.token_text import token_text

Body = TypeVar("Body")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ModelToServe:
    """An engine, and how the server presents it. Of several, the first one's network, limits and log settings count."""

    engine: Engine
    config: ServerConfig


@dataclass(frozen=True, slots=True)
class ServerContext:
    """One engine, and what turns HTTP requests into engine requests and outputs into responses.

    admission, metrics  shared by all models of the server
    peers               the contexts of all models, this one among them; the first is for requests that name no model
    """

    engine: Engine
    config: ServerConfig
    requests: RequestBuilder
    formatter: TokenFormatter
    extra_fields: ExtraFields
    admission: AdmissionControl
    metrics: Metrics
    tokenizer_thread: ThreadPoolExecutor  # one thread, because tokenizers are not thread-safe
    queue: FairQueue
    peers: list[ServerContext] = field(repr=False)

    @classmethod
    def of(cls, engine: Engine, config: ServerConfig) -> ServerContext:
        """The context of a server with one model."""
        return cls.of_models([ModelToServe(engine, config)])[0]

    @classmethod
    def of_models(cls, models: Sequence[ModelToServe]) -> list[ServerContext]:
        """A context for each model."""
        admission = AdmissionControl(models[0].config.limits, sum(model.config.max_num_seqs for model in models))
        metrics, peers = Metrics(), list[ServerContext]()
        for model in models:
            queue = FairQueue(model.config.max_num_seqs)
            metrics.add_engine(EngineSource(model.config.served_model_names[0], model.engine, queue))
            peers.append(cls._of_model(model, admission, metrics, queue, peers))
        return peers

    @classmethod
    def _of_model(
        cls,
        model: ModelToServe,
        admission: AdmissionControl,
        metrics: Metrics,
        queue: FairQueue,
        peers: list[ServerContext],
    ) -> ServerContext:
        engine, config = model.engine, model.config
        text = token_text(engine.tokenizer)
        return cls(
            engine,
            config,
            RequestBuilder(engine, text, config),
            TokenFormatter(text, engine.info.eos_token_ids),
            ExtraFields(strict=config.strict),
            admission,
            metrics,
            ThreadPoolExecutor(1, "paceline-tokenizer"),
            queue,
            peers,
        )

    @property
    def name(self) -> str:
        """What metrics and /health call the model."""
        return self.config.served_model_names[0]

    def named(self, name: str) -> ServerContext:
        """The context of the model of this name. Raises ApiError 404."""
        for peer in self.peers:
            if name in peer.config.served_model_names:
                return peer
        self.requests.check_model(name)
        return self

    async def tokenized(self, build: Callable[[Body], Result], body: Body) -> Result:
        """Run the chat template and the tokenizer in their thread: a long prompt does not delay other requests."""
        return await asyncio.get_running_loop().run_in_executor(self.tokenizer_thread, build, body)

    def generate(self, task: CompletionTask, key: str = NO_KEY) -> AsyncGenerator[ChoiceDelta, None]:
        """The outputs of all choices as they arrive. key: whose share of the engine they take."""
        timeout = self.config.limits.request_timeout
        if task.beams is not None:
            outputs = partial(self._outputs, key=key)
            search = BeamSearch(outputs, self.formatter.token_text, self.engine.info.eos_token_ids)
            return search.deltas([choice.request for choice in task.choices], task.beams, timeout)
        requests = [choice.request for choice in task.choices]
        sequences = self.metrics.sequences
        observers = [SequenceObserver(sequences, self.name, len(request.prompt)) for request in requests]
        streams = [
            self._outputs(request, key, observer.begin) if request.max_new_tokens else _nothing()
            for request, observer in zip(requests, observers)
        ]
        return merge_outputs(streams, list[Observer](observers), timeout)

    async def _outputs(
        self, request: Request, key: str, on_turn: Callable[[], None] = lambda: None
    ) -> AsyncIterator[RequestOutput]:
        """The outputs of one sequence, once it is its turn."""
        async with self.queue.turn(key, request.priority):
            on_turn()
            await self.engine.prepare(request)
            async with aclosing(self.engine.generate(request)) as outputs:  # type: ignore[type-var]
                async for output in outputs:
                    yield output

    async def close(self) -> None:
        self.admission.shutting_down = True
        await self.engine.close()
        self.tokenizer_thread.shutdown()


async def _nothing() -> AsyncIterator[RequestOutput]:
    """The output of a choice that only echoes its prompt."""
    yield RequestOutput("", finish_reason="length")
