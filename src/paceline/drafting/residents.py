"""Slots of a draft's texts that are over, for texts that go on from them.

A draft with a cache of its own reads a text when it is first asked to guess. In the next turn of a conversation, and
under a prompt that many texts share, most of it was read before.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.protocols import TILE, Runner, Slot
from paceline.kv.prefixes import shared_beginning

MOST = 16  # texts kept
WORTH = TILE  # tokens: less is not worth looking after


@dataclass(frozen=True, slots=True, eq=False)
class _Resident:
    ids: list[int]  # what the slot holds
    slot: Slot


class Residents:
    """Slots of one runner, least recently used first. They go as soon as their room is needed."""

    def __init__(self, runner: Runner, most: int = MOST) -> None:
        self._runner, self._most = runner, most
        self._kept: list[_Resident] = []

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, ids: list[int], slot: Slot) -> None:
        """A text is over whose slot holds `ids`."""
        if slot.length < WORTH:
            self._runner.close(slot)
            return
        self._kept.append(_Resident(ids[: slot.length], slot))
        while len(self._kept) > self._most:
            self._close_oldest()

    def open(self, ids: list[int]) -> Slot:
        """A slot for a text with these tokens, which already holds as much of them as any text left behind.

        Its last token is never among them: a draft reads it to say what comes next.
        """
        shared = [shared_beginning(kept.ids, ids[:-1]) for kept in self._kept]
        most = max(shared, default=0)
        if most < WORTH:
            return self._runner.open()
        found = self._kept.pop(shared.index(most))
        if len(found.ids) - most < WORTH:  # the next turn of a conversation: the slot goes on
            self._runner.trim(found.slot, most)
            return found.slot
        self._kept.append(found)
        return self._runner.fork(found.slot, most)

    def make_room(self, tokens: int) -> None:
        """Give up as many as it takes for the runner to store this many tokens."""
        while self._kept and self._runner.room() < tokens:
            self._close_oldest()

    def _close_oldest(self) -> None:
        self._runner.close(self._kept.pop(0).slot)
