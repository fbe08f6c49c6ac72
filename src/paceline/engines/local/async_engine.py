"""The engine of this process: asynchronous at the edge, one worker thread that owns the model.

Requests cross to the worker through a queue it empties before every step; what a step wrote crosses back through the
event loop of whoever asked. The worker never waits for a reader, and characters are made on the reader's side, while
the worker is already in the next pass.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

from paceline.core.sequence import Constraint, Sequence
from paceline.core.stats import EngineStats
from paceline.core.stopping import StopRules
from paceline.core.types import ModelInfo, Request, RequestOutput
from paceline.core.verify import COUPLED
from paceline.drafting.router import PREDICTION
from paceline.engines.local.request_state import RequestState, StepOutput
from paceline.engines.local.scheduler import Scheduler
from paceline.engines.local.settings import EngineSettings
from paceline.engines.local.step import EngineParts
from paceline.engines.local.stop_conditions import stop_rules
from paceline.engines.local.structured_output import GrammarCompiler
from paceline.errors import EngineClosed, OptionError, PromptError
from paceline.hub.tokenizer import StreamDetokenizer, Tokenizer

LOG = logging.getLogger(__name__)
NONE = "none"


@dataclass(frozen=True, slots=True)
class _Message:
    """What the worker should do before its next step."""

    do: Callable[[RequestState], None]
    request_state: RequestState


class LocalEngine:
    """Writes many sequences at a time with one model, each with its own settings, drafter and k.

    methods  words a request may name, the machinery's own first: a request that names none gets that one, or
             `prediction` if it brings a prediction
    """

    def __init__(
        self,
        parts: EngineParts,
        tokenizer: Tokenizer,
        settings: EngineSettings | None = None,
        methods: tuple[str, ...] = (NONE,),
    ) -> None:
        self.info: ModelInfo = parts.target.info
        self.methods = methods
        self.tokenizer = tokenizer
        self._verifier = parts.verifier
        self._scheduler = Scheduler(parts, settings or EngineSettings())
        self._inbox: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._grammars: GrammarCompiler | None = None
        self._thread = threading.Thread(target=self._work, name="paceline-worker", daemon=True)
        self._thread.start()

    # --- Engine -------------------------------------------------------------------------------------------------------

    def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        """Write one sequence. Raises OptionError or PromptError at once; StepFailed or OutOfMemory on the way."""
        return self._stream(self._text(request))

    def stats(self) -> EngineStats:
        """What the engine does now and has done since it started."""
        return self._scheduler.load()

    async def close(self) -> None:
        self._closing.set()
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    # --- the reader's side --------------------------------------------------------------------------------------------

    def _text(self, request: Request) -> Sequence:
        if self._closing.is_set():
            raise EngineClosed("the engine has been closed")
        seq = Sequence(
            request.prompt,
            request.sampling,
            self._rules(request),
            constraint=self._constraint(request),
            logprobs=request.logprobs,
        )
        seq.method, seq.prediction = self._method(request), request.prediction
        seq.num_draft_tokens = 0 if seq.method == NONE else request.num_draft_tokens
        if request.sampling.seed is not None and self._verifier.rule != "lossy-typical":
            seq.acceptance = COUPLED  # the sequence is then a function of its seed, whatever else is in the batch
        return seq

    def _constraint(self, request: Request) -> Constraint | None:
        if request.structured_output is None:
            return None
        if self._grammars is None:
            self._grammars = GrammarCompiler(self.tokenizer.hf_tokenizer, self.info)
        return self._grammars.compile(request.structured_output)

    def _method(self, request: Request) -> str:
        if request.method is None:
            return PREDICTION if request.prediction and PREDICTION in self.methods else self.methods[0]
        if request.method not in self.methods:
            raise OptionError(f"method must be one of {', '.join(self.methods)}; not {request.method!r}")
        return request.method

    def _rules(self, request: Request) -> StopRules:
        if not request.prompt:
            raise PromptError("the prompt is empty; there is nothing to continue")
        capacity, length = self._scheduler.memory.capacity, len(request.prompt)
        if length >= capacity:
            raise PromptError(f"the prompt has {length} tokens; the cache holds {capacity} (--cache-tokens)")
        wanted = min(request.max_new_tokens, capacity - length)
        return stop_rules(self.info, self.tokenizer, request.prompt, wanted, request.stop, request.ignore_eos)

    async def _stream(self, seq: Sequence) -> AsyncIterator[RequestOutput]:
        loop = asyncio.get_running_loop()
        grown: asyncio.Queue[StepOutput] = asyncio.Queue()

        def tell(step_output: StepOutput) -> None:
            try:
                loop.call_soon_threadsafe(grown.put_nowait, step_output)
            except RuntimeError:  # the reader's loop is gone, and the reader with it
                LOG.debug("a text ended after its reader")

        request_state = RequestState(seq, tell)
        characters = self.tokenizer.stream(seq.stopping.stop_strings)
        self._inbox.put(_Message(self._scheduler.add, request_state))
        try:
            while not (step_output := await grown.get()).error:
                for output in _pieces(step_output, seq, characters):
                    yield output
                if step_output.finish_reason is not None:
                    return
            raise step_output.error
        finally:
            self._inbox.put(_Message(self._scheduler.drop, request_state))

    # --- the worker's side --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._closing.is_set():
            self._take_in(wait=not self._scheduler.busy)
            if self._scheduler.busy:
                self._scheduler.round()
        self._take_in(wait=False)
        self._scheduler.abort_all()

    def _take_in(self, wait: bool) -> None:
        """Do what was asked since the last step; with nothing to write, sleep until something is."""
        while wait or not self._inbox.empty():
            message = self._inbox.get()
            wait = False
            if message is not None:
                message.do(message.request_state)


def _pieces(step_output: StepOutput, seq: Sequence, characters: StreamDetokenizer) -> Iterator[RequestOutput]:
    """At most two pieces a step: the draft tokens that stood, and the target's own token."""
    runs = [slice(0, step_output.accepted), slice(step_output.accepted, len(step_output.tokens))]
    runs = [run for run in runs if run.start < run.stop] or [slice(0, 0)]
    for run in runs:
        tokens, last = step_output.tokens[run], run is runs[-1]
        over = last and step_output.finish_reason is not None
        shown = characters.feed(list(tokens))
        yield RequestOutput(
            shown + characters.flush() if over else shown,
            tokens,
            run.start < step_output.accepted,
            None if step_output.logprobs is None else step_output.logprobs[run],
            step_output.finish_reason if over else None,
            seq.stats if over else None,
            step_output.drafted if last else None,
        )
