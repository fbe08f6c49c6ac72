"""Tails of the chi² distribution. scipy.stats has them too, but takes a second to import: more than most tests."""

from __future__ import annotations

from scipy import special


def sf(statistic: float, freedom: int) -> float:
    """The probability of a statistic as large as this one."""
    return float(special.chdtrc(freedom, statistic))


def isf(probability: float, freedom: int) -> float:
    """The statistic that is passed with this probability."""
    return float(special.chdtri(freedom, probability))
