"""An engine that records its traffic: what the target wrote goes into the ring, and the trainer waits meanwhile."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from paceline.core.protocols import Engine, Tokenizer
from paceline.core.stats import EngineStats, LearningStats, SpecStats
from paceline.core.types import Request, RequestOutput
from paceline.learning.decision import FirstTokens
from paceline.learning.ring import TrafficRing

WINDOW = 256  # live sequences whose acceptance is remembered
IDLE_SECONDS = 0.25  # without a request, after which the trainer may run: requests that follow one another are not idle


@dataclass(frozen=True, slots=True)
class Activity:
    """What is told when requests begin to run, and when none has run for a while."""

    busy: Callable[[], None]
    idle: Callable[[], None]


class LearningEngine(Engine):
    """Passes everything on to an engine and records the sequences that it finishes.

    live  first draft tokens of the latest sequences that the engine's own method drafted
    """

    def __init__(
        self, engine: Engine, ring: TrafficRing, activity: Activity, learning_stats: Callable[[], LearningStats]
    ) -> None:
        self._engine, self._ring, self._activity, self._learning_stats = engine, ring, activity, learning_stats
        self.info, self.methods = engine.info, engine.methods
        self.live: deque[FirstTokens] = deque(maxlen=WINDOW)
        self._num_running = 0

    @property
    def is_idle(self) -> bool:
        """No request is under way."""
        return not self._num_running

    @property
    def tokenizer(self) -> Tokenizer:
        return self._engine.tokenizer

    def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        return self._recorded(request, self._engine.generate(request))

    async def _recorded(self, request: Request, stream: AsyncIterator[RequestOutput]) -> AsyncIterator[RequestOutput]:
        token_ids: list[int] = []
        self._begin()
        try:
            async with aclosing(stream) as outputs:  # type: ignore[type-var]
                async for output in outputs:
                    token_ids += output.token_ids
                    if output.finish_reason is not None:
                        self._record(request, token_ids, output.stats)
                    yield output
        finally:
            self._end()

    def _record(self, request: Request, token_ids: list[int], stats: SpecStats | None) -> None:
        """An adapter's output is not the model's own, and is not learned from."""
        if request.lora is not None:
            return
        self._ring.add([*request.prompt, *token_ids], len(request.prompt))
        own = request.method in (None, self.methods[0]) and request.prediction is None
        if own and stats is not None and stats.offered_at and stats.offered_at[0]:
            self.live.append(FirstTokens(stats.accepted_at[0], stats.offered_at[0]))

    # --- activity -----------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._num_running += 1
        if self._num_running == 1:
            self._activity.busy()

    def _end(self) -> None:
        self._num_running -= 1
        if not self._num_running:
            asyncio.get_running_loop().call_later(IDLE_SECONDS, self._tell_idle)

    def _tell_idle(self) -> None:
        if not self._num_running:
            self._activity.idle()

    # --- passed on ----------------------------------------------------------------------------------------------------

    async def prepare(self, request: Request) -> None:
        await self._engine.prepare(request)

    async def embed(self, token_ids: list[int], pooling: str) -> list[float]:
        self._begin()
        try:
            return await self._engine.embed(token_ids, pooling)
        finally:
            self._end()

    async def update_head(self, folder: str) -> None:
        await self._engine.update_head(folder)

    def stats(self) -> EngineStats:
        return replace(self._engine.stats(), learning=self._learning_stats())

    def check_health(self) -> None:
        self._engine.check_health()

    async def close(self) -> None:
        await self._engine.close()
