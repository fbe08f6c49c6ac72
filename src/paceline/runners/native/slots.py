"""What the runner remembers of one text: which pages it holds, and what an exit has left there. And the pages."""

from __future__ import annotations

import itertools
import math
import mmap

import torch
from torch import Tensor

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


def empty_pages(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for keys or values, all zeros: attention may read, and weigh with nothing, what no token has written yet.

    On a CPU the system gives such memory only as it is touched, so that a cache costs what texts fill of it. In small
    pages: of large ones a text's first tokens would touch two a layer, and clearing those takes as long as a pass.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    room = mmap.mmap(-1, math.prod(size) * dtype.itemsize, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        room.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(room, dtype=dtype).view(size)
