"""Which sequence the engine gets next: by priority, then one of each API key in turn, then in order of arrival.

The engine never gets more sequences than it runs at a time, so the order of those that wait is decided here, for every
engine alike. A key that sends a hundred requests delays another key's first one by at most one sequence.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

Turn = asyncio.Future[None]


class FairQueue:
    """Sequences that wait for one engine. max_num_seqs: how many it runs at a time."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._num_running = 0
        # By priority, then by key: the key that comes first is the next one, and goes to the end after its turn.
        self._waiting: dict[int, dict[str, deque[Turn]]] = {}

    @property
    def num_waiting(self) -> int:
        return sum(len(turns) for by_key in tuple(self._waiting.values()) for turns in tuple(by_key.values()))

    @asynccontextmanager
    async def turn(self, key: str, priority: int = 0) -> AsyncIterator[None]:
        """Wait until the engine has room for one sequence of this key, and hold the place. Low priorities are first."""
        await self._acquire(key, priority)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, key: str, priority: int) -> None:
        if self._num_running < self._max_num_seqs and not self._waiting:
            self._num_running += 1
            return
        turn: Turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(priority, {}).setdefault(key, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release()  # the turn came together with the cancellation
            else:
                self._forget(turn, key, priority)
            raise

    def _release(self) -> None:
        self._num_running -= 1
        while self._waiting and self._num_running < self._max_num_seqs:
            turn = self._next()
            if not turn.done():
                self._num_running += 1
                turn.set_result(None)

    def _next(self) -> Turn:
        priority = min(self._waiting)
        by_key = self._waiting[priority]
        key = next(iter(by_key))
        turns = by_key.pop(key)
        turn = turns.popleft()
        if turns:
            by_key[key] = turns
        elif not by_key:
            del self._waiting[priority]
        return turn

    def _forget(self, turn: Turn, key: str, priority: int) -> None:
        """Take a turn that was given up out of the queue, where it still is."""
        by_key = self._waiting.get(priority, {})
        if turn in by_key.get(key, ()):
            by_key[key].remove(turn)
            if not by_key[key]:
                del by_key[key]
            if not by_key:
                del self._waiting[priority]
