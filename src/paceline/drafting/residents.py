"""Slots of a draft's texts that are over, for texts that go on from them.

A draft with a cache of its own reads a text when it is first asked to guess. In the next turn of a conversation, and
under a prompt that many texts share, most of it was read before.
"""

from __future__ import annotations

from paceline.core.protocols import TILE, Runner, Slot
from paceline.kv.prefixes import PrefixIndex

MOST = 16  # texts kept


class Residents:
    """Slots of one runner, found by what they hold. They go, oldest first, as soon as their room is needed."""

    def __init__(self, runner: Runner, most: int = MOST) -> None:
        self._runner, self._most = runner, most
        self._index = PrefixIndex(TILE)  # held by slots; less than a tile in common is not worth looking after

    def __len__(self) -> int:
        return len(self._index)

    def keep(self, ids: list[int], slot: Slot) -> None:
        """A text is over whose slot holds `ids`, or a beginning of them."""
        if slot.length < TILE:
            self._runner.close(slot)
            return
        self._index.add(slot, ids[: slot.length])
        if len(self._index) > self._most:
            self._close_oldest()

    def open(self, ids: list[int]) -> Slot:
        """A slot for a text with these tokens, which already holds as much of them as any text left behind.

        Its last token is never among them: a draft reads it to say what comes next.
        """
        found = self._index.longest(ids[:-1])
        if found is None:
            return self._runner.open()
        slot = found.holder
        assert isinstance(slot, Slot)
        if self._index.length(slot) - found.length >= TILE:  # another text: that one may still be gone on from
            self._index.touch(slot)
            return self._runner.fork(slot, found.length)
        self._index.remove(slot)
        self._runner.trim(slot, found.length)
        return slot

    def make_room(self, tokens: int) -> None:
        """Give up as many as it takes for the runner to store this many tokens."""
        while self._index and self._runner.room() < tokens:
            self._close_oldest()

    def _close_oldest(self) -> None:
        slot = self._index.oldest()
        assert isinstance(slot, Slot)
        self._index.remove(slot)
        self._runner.close(slot)
