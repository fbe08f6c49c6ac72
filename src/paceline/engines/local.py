"""The engine of this process: asynchronous at the edge, one worker thread that owns the model.

Requests cross to the worker through a queue it empties before every round; what a round wrote crosses back through the
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

from paceline.core.acceptance import COUPLED
from paceline.core.protocols import ModelCard, Piece, Request
from paceline.core.sequence import Sequence
from paceline.core.stopping import StopRules
from paceline.core.tally import Tally
from paceline.decode.rules import stop_rules
from paceline.decode.step import Machinery
from paceline.decode.text import Codec, Stream
from paceline.drafting.by_text import PREDICTION
from paceline.engines.load import Load
from paceline.engines.scheduler import Scheduler
from paceline.engines.settings import EngineSettings
from paceline.engines.ticket import Growth, Ticket
from paceline.errors import EngineClosed, OptionError, PromptError

LOG = logging.getLogger(__name__)
NONE = "none"


@dataclass(frozen=True, slots=True)
class _Message:
    """What the worker should do before its next round."""

    do: Callable[[Ticket], None]
    ticket: Ticket


class LocalEngine:
    """Writes many texts at a time with one model, each with its own settings, drafter and k.

    methods  words a request may name, the machinery's own first: a request that names none gets that one, or
             `prediction` if it brings a prediction
    """

    def __init__(
        self,
        machinery: Machinery,
        codec: Codec,
        settings: EngineSettings | None = None,
        methods: tuple[str, ...] = (NONE,),
    ) -> None:
        self.card: ModelCard = machinery.target.card
        self.methods = methods
        self.codec = codec
        self._judge = machinery.judge
        self._scheduler = Scheduler(machinery, settings or EngineSettings())
        self._inbox: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="paceline-worker", daemon=True)
        self._thread.start()

    # --- Engine -------------------------------------------------------------------------------------------------------

    def generate(self, request: Request) -> AsyncIterator[Piece]:
        """Write one text. Raises OptionError or PromptError at once; RoundFailed or OutOfMemory on the way."""
        return self._stream(self._text(request))

    def tally(self) -> Tally:
        return self._scheduler.tally

    def load(self) -> Load:
        """What the engine is doing now and has done so far."""
        return self._scheduler.load()

    async def close(self) -> None:
        self._closing.set()
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    # --- the reader's side --------------------------------------------------------------------------------------------

    def _text(self, request: Request) -> Sequence:
        if self._closing.is_set():
            raise EngineClosed("the engine has been closed")
        text = Sequence(
            request.prompt,
            request.sampling,
            self._rules(request),
            constraint=request.constraint,
            logprobs=request.logprobs,
        )
        text.method, text.prediction = self._method(request), request.prediction
        text.draft_tokens = 0 if text.method == NONE else request.draft_tokens
        if request.sampling.seed is not None and self._judge.rule != "lossy-typical":
            text.acceptance = COUPLED  # the text is then a function of its seed, whatever else is in the batch
        return text

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
        return stop_rules(self.card, self.codec, request.prompt, wanted, request.stop, request.ignore_end)

    async def _stream(self, text: Sequence) -> AsyncIterator[Piece]:
        loop = asyncio.get_running_loop()
        grown: asyncio.Queue[Growth] = asyncio.Queue()

        def tell(growth: Growth) -> None:
            try:
                loop.call_soon_threadsafe(grown.put_nowait, growth)
            except RuntimeError:  # the reader's loop is gone, and the reader with it
                LOG.debug("a text ended after its reader")

        ticket = Ticket(text, tell)
        characters = self.codec.stream(text.stopping.stop_strings)
        self._inbox.put(_Message(self._scheduler.add, ticket))
        try:
            while not (growth := await grown.get()).error:
                for piece in _pieces(growth, text, characters):
                    yield piece
                if growth.finish_reason is not None:
                    return
            raise growth.error
        finally:
            self._inbox.put(_Message(self._scheduler.drop, ticket))

    # --- the worker's side --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while not self._closing.is_set():
            self._take_in(wait=not self._scheduler.busy)
            if self._scheduler.busy:
                self._scheduler.round()
        self._take_in(wait=False)
        self._scheduler.abort_all()

    def _take_in(self, wait: bool) -> None:
        """Do what was asked since the last round; with nothing to write, sleep until something is."""
        while wait or not self._inbox.empty():
            message = self._inbox.get()
            wait = False
            if message is not None:
                message.do(message.ticket)


def _pieces(growth: Growth, text: Sequence, characters: Stream) -> Iterator[Piece]:
    """At most two pieces a round: the guesses that stood, and the target's own token."""
    runs = [slice(0, growth.accepted), slice(growth.accepted, len(growth.tokens))]
    runs = [run for run in runs if run.start < run.stop] or [slice(0, 0)]
    for run in runs:
        tokens, last = growth.tokens[run], run is runs[-1]
        over = last and growth.finish_reason is not None
        shown = characters.feed(list(tokens))
        yield Piece(
            shown + characters.flush() if over else shown,
            tokens,
            run.start < growth.accepted,
            None if growth.logprobs is None else growth.logprobs[run],
            growth.finish_reason if over else None,
            text.tally if over else None,
            growth.drafted if last else None,
        )
