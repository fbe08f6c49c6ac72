"""What the runner remembers of one sequence: which blocks it holds, and what an exit has left there. And the blocks."""

from __future__ import annotations

import itertools
import math
import mmap

import torch
from torch import Tensor

from paceline.core.types import SequenceCache
from paceline.kv.block_manager import BLOCK_SIZE as TILE
from paceline.runners.native.early_exit import Ahead

BLOCK_SIZE = TILE  # tokens: a tile of a prompt must not end inside a block
_numbers = itertools.count()


class NativeSequenceCache(SequenceCache):
    """A holder of blocks."""

    __slots__ = ("ahead", "fresh", "seq_id")

    def __init__(self) -> None:
        super().__init__()
        self.seq_id = next(_numbers)
        self.fresh = 0  # where the last row read begins
        self.ahead: Ahead | None = None  # what an exit has left for verification


def own(seq_cache: SequenceCache) -> NativeSequenceCache:
    assert isinstance(seq_cache, NativeSequenceCache), "this slot belongs to another runner"
    return seq_cache


def empty_blocks(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Room for keys or values, all zeros: attention may read, and weigh with nothing, what no token has written yet.

    On a CPU the system gives such memory only as it is touched, so that a cache costs what sequences fill of it. In small
    blocks: of large ones a sequence's first tokens would touch two a layer, and clearing those takes as long as a pass.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    room = mmap.mmap(-1, math.prod(size) * dtype.itemsize, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        room.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(room, dtype=dtype).view(size)
