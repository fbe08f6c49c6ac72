"""Random numbers that depend on a seed and a position alone."""

from __future__ import annotations


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
