"""Scratch memory that several graphs share.

A graph reads and writes the addresses it was captured with, so each graph would keep its own tensors; of distributions
over a vocabulary that is tens of megabytes a graph. Where an output is read before the next graph runs, one tensor is
enough for all.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor


class Scratch:
    """One float32 tensor; every request gets a view of its beginning.

    It grows by doubling, so the smaller tensors that earlier graphs still hold never add up to more than the newest.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def of(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """A tensor of this shape; it overlaps every tensor returned before."""
        size = prod(shape)
        if self._memory.device.type != device.type or self._memory.numel() < size:
            self._memory = torch.zeros(1 << max(size - 1, 0).bit_length(), device=device)
        return self._memory[:size].view(shape)
