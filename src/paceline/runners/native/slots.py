"""What the runner remembers of one text: which pages it holds, and what an exit has left there."""

from __future__ import annotations

import itertools

from paceline.core.protocols import TILE, Slot
from paceline.runners.native.resume import Ahead

PAGE = TILE  # tokens: a tile of a prompt must not end inside a page
_numbers = itertools.count()


class NativeSlot(Slot):
    """A holder of pages."""

    __slots__ = ("ahead", "fresh", "number")

    def __init__(self) -> None:
        super().__init__()
        self.number = next(_numbers)
        self.fresh = 0  # where the last row read begins
        self.ahead: Ahead | None = None  # what an exit has left for verification


def own(slot: Slot) -> NativeSlot:
    assert isinstance(slot, NativeSlot), "this slot belongs to another runner"
    return slot
