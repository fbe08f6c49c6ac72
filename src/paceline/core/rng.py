"""The random numbers of one sequence: one source, two streams.

next          numbers in the order they are drawn, from the sequence's own generator
at_positions  numbers that depend on the seed and a position alone: the same whatever was drafted before

`keyed_exponentials` makes of one such number as many as a draw over the vocabulary needs, one for each token id.
"""

from __future__ import annotations

import torch
from torch import Tensor

# splitmix64 in the signed integers that torch has: products wrap, and shifts need a mask.
_STEP, _FIRST_FACTOR, _SECOND_FACTOR = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_KEY_BITS, _BITS = 53, 52  # of a number in [0, 1); of a keyed number, so that adding a half is exact


class SequenceRng:
    """Uniform numbers in [0, 1) of one sequence, in float64."""

    def __init__(self, seed: int | None) -> None:
        # Without a seed of its own a sequence draws one from torch's generator, so that torch.manual_seed decides.
        self.seed = int(torch.randint(2**63 - 1, ())) if seed is None else seed
        self.generator = torch.Generator().manual_seed(self.seed & (2**63 - 1))

    def next(self, count: int) -> Tensor:
        """The next `count` numbers of the generator. float64 [count]"""
        return torch.rand(count, generator=self.generator, dtype=torch.float64)

    def at_positions(self, first: int, count: int) -> Tensor:
        """The numbers of positions first to first + count. float64 [count]"""
        return torch.tensor([position_uniform(self.seed, first + step) for step in range(count)], dtype=torch.float64)


def position_uniform(seed: int, position: int) -> float:
    """A uniform number in [0, 1) that depends on seed and position alone (splitmix64)."""
    mask = (1 << 64) - 1
    state = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xD1342543DE82EF95) & mask
    for _ in range(2):  # twice: neighbouring positions of neighbouring seeds must not look alike
        state = (state + 0x9E3779B97F4A7C15) & mask
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
        state ^= state >> 31
    return (state >> 11) / float(1 << 53)


def keyed_exponentials(uniforms: Tensor, counters: Tensor) -> Tensor:
    """Exponentially distributed numbers that depend on a uniform number and a counter alone. float64, broadcast

    uniforms  [..., 1] float64 in [0, 1): each is the key of a stream of its own
    counters  int64: which numbers of the stream; any number at any time, in no order
    """
    state = (uniforms * float(1 << _KEY_BITS)).long() + counters * _STEP
    state = (state ^ _shifted(state, 30)) * _FIRST_FACTOR
    state = (state ^ _shifted(state, 27)) * _SECOND_FACTOR
    state = state ^ _shifted(state, 31)
    # Never 0 and never 1, so every number is finite and above 0; near 1 the steps are as fine as float64 has them.
    return -torch.log((_shifted(state, 64 - _BITS).double() + 0.5) * 2.0**-_BITS)


def _shifted(state: Tensor, bits: int) -> Tensor:
    """A shift to the right that fills with zeros, whatever the sign."""
    return (state >> bits) & ((1 << (64 - bits)) - 1)
