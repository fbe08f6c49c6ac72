"""KVManager that captured work shares.

A graph reads and writes where it was captured, so each would keep its own tensors for ever; of distributions over a
vocabulary that is tens of megabytes a graph. Where a result is read before the next graph runs, one place does for all.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor


class Scratch:
    """One stretch of float32 numbers, handed out from its beginning every time. Grows by doubling, so that what
    earlier graphs still hold of smaller ones is never more than the newest."""

    def __init__(self) -> None:
        self._space = torch.empty(0)

    def of(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """A tensor of this shape; whatever was handed out before may lie under it."""
        size = prod(shape)
        if self._space.device.type != device.type or self._space.numel() < size:
            self._space = torch.zeros(1 << max(size - 1, 0).bit_length(), device=device)
        return self._space[:size].view(shape)
