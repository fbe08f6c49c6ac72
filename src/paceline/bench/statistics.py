"""Tests of counts against exact probabilities, with what they can and cannot see.

The tails come from torch's incomplete gamma function, so nothing beyond torch is needed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import torch

Outcome = TypeVar("Outcome", bound=Hashable)
LEAST_EXPECTED = 5.0  # cells that should hold fewer draws than this are pooled: the chi² tail is not exact there


@dataclass(frozen=True, slots=True)
class Fit:
    """How well draws agree with what they should be.

    p_value   the chance of a deviation at least this large if nothing is wrong
    distance  total variation between the draws and the exact distribution, noise included
    """

    draws: int
    chi2: float
    cells: int
    p_value: float
    distance: float

    @property
    def freedom(self) -> int:
        return max(self.cells - 1, 1)


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the least and the greatest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(median(values), min(values), max(values))


def chi2_tail(x: float, freedom: int) -> float:
    """P(chi² >= x)."""
    if x <= 0:
        return 1.0
    half = torch.tensor([freedom / 2, x / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def chi2_quantile(alpha: float, freedom: int) -> float:
    """The x with P(chi² >= x) = alpha."""
    low, high = 0.0, 10.0
    while chi2_tail(high, freedom) > alpha:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if chi2_tail(middle, freedom) > alpha else (low, middle)
    return (low + high) / 2


def power(distance: float, draws: int, freedom: int, alpha: float) -> float:
    """At least this likely is it to be found when the output is `distance` (total variation) away from the target's.

    A deviation d of total variation t has Σ d²/p >= (Σ|d|)² = 4t², so the test statistic's non-centrality is at least
    4·draws·t²: a bound that holds for every way of being wrong.
    """
    return _beyond(chi2_quantile(alpha, freedom), 2 * draws * distance * distance, freedom)


def _beyond(edge: float, shift: float, freedom: int) -> float:
    """P(non-central chi² >= edge); `shift` is half the non-centrality."""
    steps = torch.arange(int(shift + 10 * math.sqrt(shift + 1) + 10), dtype=torch.float64)
    # The non-central distribution is a Poisson mixture of central ones.
    weights = torch.exp(torch.xlogy(steps, torch.tensor(shift)) - shift - torch.lgamma(steps + 1))
    tails = torch.special.gammaincc(freedom / 2 + steps, torch.full_like(steps, edge / 2))
    return min(float((weights * tails).sum()), 1.0)


def visible_distance(draws: int, freedom: int, alpha: float, wanted: float = 0.95) -> float:
    """The least total variation that would be found with probability `wanted`."""
    low, high, edge = 0.0, 1.0, chi2_quantile(alpha, freedom)
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if _beyond(edge, 2 * draws * middle**2, freedom) < wanted else (low, middle)
    return high


def against_exact(counts: Counter[Outcome], exact: Mapping[Outcome, float]) -> Fit:
    """Pearson's chi² of counts against exact probabilities. A draw of probability 0 settles the matter: p = 0."""
    draws = sum(counts.values())
    distance = _distance(counts, exact, draws)
    if any(exact.get(outcome, 0.0) <= 0.0 for outcome in counts):
        return Fit(draws, math.inf, 2, 0.0, distance)
    seen, expected = _pooled(counts, exact, draws)
    chi2 = sum((found - wanted) ** 2 / wanted for found, wanted in zip(seen, expected))
    p_value = chi2_tail(chi2, len(seen) - 1) if len(seen) > 1 else 1.0
    return Fit(draws, chi2, len(seen), p_value, distance)


def _pooled(
    counts: Mapping[Outcome, int], exact: Mapping[Outcome, float], draws: int
) -> tuple[list[float], list[float]]:
    """Counts and expectations of cells that each expect enough draws; the rarest outcomes share cells."""
    seen: list[float] = []
    expected: list[float] = []
    for outcome, uniforms in sorted(exact.items(), key=lambda pair: pair[1]):
        if uniforms <= 0:
            continue
        if expected and expected[-1] < LEAST_EXPECTED:
            seen[-1] += counts.get(outcome, 0)
            expected[-1] += uniforms * draws
        else:
            seen.append(counts.get(outcome, 0))
            expected.append(uniforms * draws)
    return seen, expected


def two_samples(one: Counter[Outcome], other: Counter[Outcome]) -> Fit:
    """Homogeneity of two sets of draws, for when no exact distribution can be had."""
    n, m = sum(one.values()), sum(other.values())
    both = one + other
    chi2, cells, left = 0.0, 0, [0, 0]
    for outcome, together in both.items():
        if together * min(n, m) / (n + m) < LEAST_EXPECTED:
            left[0], left[1] = left[0] + one[outcome], left[1] + other[outcome]
            continue
        chi2, cells = chi2 + _cell(one[outcome], other[outcome], n, m), cells + 1
    if sum(left):
        chi2, cells = chi2 + _cell(left[0], left[1], n, m), cells + 1
    distance = sum(abs(one[outcome] / n - other[outcome] / m) for outcome in both) / 2
    return Fit(min(n, m), chi2, cells, chi2_tail(chi2, cells - 1) if cells > 1 else 1.0, distance)


def _cell(a: int, b: int, n: int, m: int) -> float:
    share = (a + b) / (n + m)
    return (a - n * share) ** 2 / (n * share) + (b - m * share) ** 2 / (m * share)


def _distance(counts: Mapping[Outcome, int], exact: Mapping[Outcome, float], draws: int) -> float:
    outcomes = set(counts) | set(exact)
    return sum(abs(counts.get(outcome, 0) / draws - exact.get(outcome, 0.0)) for outcome in outcomes) / 2
