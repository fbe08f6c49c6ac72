"""The requests of an engine whose loop runs elsewhere: who is under way, and what all of them have done."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field

from paceline.core.stats import EngineStats, SpecStats
from paceline.engines.http.client import Json
from paceline.errors import EngineClosed, EngineFailed, PacelineError

Item = Json | PacelineError | None  # None: the answer is over


@dataclass(eq=False, slots=True)
class TrackedRequest:
    """The events of one request. `closed`: the engine was closed before the answer was over."""

    loop: asyncio.AbstractEventLoop
    items: asyncio.Queue[Item] = field(default_factory=asyncio.Queue)
    closed: bool = False

    def close(self) -> None:
        """Wake the reader, from any thread."""
        self.closed = True
        try:
            self.loop.call_soon_threadsafe(self.items.put_nowait, None)
        except RuntimeError:  # the reader's loop has closed
            return

    async def events(self, source: AsyncIterator[Json]) -> AsyncIterator[Json]:
        """What the source yields, until it ends or the engine is closed. Raises what the source raises."""
        task = asyncio.create_task(self._read(source))
        try:
            while (item := await self.items.get()) is not None and not self.closed:
                if isinstance(item, PacelineError):
                    raise item
                yield item
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _read(self, source: AsyncIterator[Json]) -> None:
        try:
            async with aclosing(source) as events:  # type: ignore[type-var]
                async for event in events:
                    self.items.put_nowait(event)
            self.items.put_nowait(None)
        except PacelineError as error:
            self.items.put_nowait(error)
        except Exception as error:  # the reader must never wait in vain
            self.items.put_nowait(EngineFailed(f"the connection failed: {error!r}"))


class RequestTracker:
    """Counts requests and their outcomes. Safe from any thread. max_num_seqs: that run at a time."""

    def __init__(self, max_num_seqs: int | None = None) -> None:
        self._max_num_seqs = max_num_seqs
        self._lock = threading.Lock()
        self._open: set[TrackedRequest] = set()
        self._stats = EngineStats()
        self.closed = False

    def begin(self) -> TrackedRequest:
        """A request starts. Raises EngineClosed."""
        request = TrackedRequest(asyncio.get_running_loop())
        with self._lock:
            if self.closed:
                raise EngineClosed("the engine has been closed")
            self._open.add(request)
        return request

    def end(self, request: TrackedRequest) -> None:
        with self._lock:
            self._open.discard(request)

    def count(self, method: str, prompt_tokens: int, stats: SpecStats, draft_lengths: dict[int, int]) -> None:
        """Add what a request has done."""
        with self._lock:
            total = self._stats
            total.prompt_tokens += prompt_tokens
            for counts in (total.spec, total.by_method.setdefault(method, SpecStats())):
                counts.add(stats)
            for number, steps in draft_lengths.items():
                total.draft_lengths[number] = total.draft_lengths.get(number, 0) + steps

    def count_failure(self) -> None:
        with self._lock:
            self._stats.failures += 1

    @property
    def num_open(self) -> int:
        return len(self._open)

    def snapshot(self) -> EngineStats:
        """The counts of now."""
        with self._lock:
            stats = copy.deepcopy(self._stats)
            stats.running = len(self._open) if self._max_num_seqs is None else min(len(self._open), self._max_num_seqs)
            stats.waiting = len(self._open) - stats.running
        return stats

    def close(self) -> None:
        """End every request that is under way. Closing twice is harmless."""
        with self._lock:
            self.closed = True
            requests = list(self._open)
        for request in requests:
            request.close()
