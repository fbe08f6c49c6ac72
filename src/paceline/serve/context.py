"""What the routes of one server work with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from paceline.core.protocols import Engine
from paceline.core.types import RequestOutput
from paceline.serve.config import ServerConfig
from paceline.serve.extra_fields import ExtraFields
from paceline.serve.limits import AdmissionControl
from paceline.serve.logprob_format import TokenFormatter
from paceline.serve.metrics import Metrics, TokenTimer
from paceline.serve.requests import CompletionTask, RequestBuilder
from paceline.serve.responses import ChoiceDelta
from paceline.serve.streaming import Observer, merge_outputs
from paceline.serve.token_text import token_text

Body = TypeVar("Body")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class ServerContext:
    """The engine, and what turns HTTP requests into engine requests and outputs into responses."""

    engine: Engine
    config: ServerConfig
    requests: RequestBuilder
    formatter: TokenFormatter
    extra_fields: ExtraFields
    admission: AdmissionControl
    metrics: Metrics
    tokenizer_thread: ThreadPoolExecutor  # one thread, because tokenizers are not thread-safe

    @classmethod
    def of(cls, engine: Engine, config: ServerConfig) -> ServerContext:
        text = token_text(engine.tokenizer)
        return cls(
            engine,
            config,
            RequestBuilder(engine, text, config),
            TokenFormatter(text, engine.info.eos_token_ids),
            ExtraFields(strict=config.strict),
            AdmissionControl(config.limits, config.max_num_seqs),
            Metrics(engine),
            ThreadPoolExecutor(1, "paceline-tokenizer"),
        )

    async def tokenized(self, build: Callable[[Body], Result], body: Body) -> Result:
        """Run the chat template and the tokenizer in their thread: a long prompt does not delay other requests."""
        return await asyncio.get_running_loop().run_in_executor(self.tokenizer_thread, build, body)

    def generate(self, task: CompletionTask) -> AsyncGenerator[ChoiceDelta, None]:
        """The outputs of all choices as they arrive."""
        streams = [
            self.engine.generate(choice.request) if choice.request.max_new_tokens else _nothing()
            for choice in task.choices
        ]
        timers: list[Observer] = [TokenTimer(self.metrics) for _ in streams]
        return merge_outputs(streams, timers, self.config.limits.request_timeout)

    async def close(self) -> None:
        self.admission.shutting_down = True
        await self.engine.close()
        self.tokenizer_thread.shutdown()


async def _nothing() -> AsyncIterator[RequestOutput]:
    """The output of a choice that only echoes its prompt."""
    yield RequestOutput("", finish_reason="length")
