"""Tests of counts against exact probabilities, and how large a deviation they find.

The tails are computed here, because `paceline doctor` must not wait for torch or need scipy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

Event = TypeVar("Event", bound=Hashable)
LEAST_EXPECTED = 5.0  # cells that expect fewer draws than this are pooled: the chi² tail is not exact there
PRECISION, TINY, MAX_TERMS = 1e-15, 1e-300, 10_000  # of the tails


@dataclass(frozen=True, slots=True)
class GoodnessOfFit:
    """How well draws agree with an expected distribution.

    p_value   the probability of a deviation at least this large if nothing is wrong
    distance  total variation between the draws and the exact distribution, noise included
    """

    draws: int
    chi2: float
    num_cells: int
    p_value: float
    distance: float

    @property
    def degrees_of_freedom(self) -> int:
        return max(self.num_cells - 1, 1)


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the least and the greatest value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(median(values), min(values), max(values))


def chi2_tail(x: float, degrees_of_freedom: int) -> float:
    """P(chi² >= x)."""
    if x <= 0:
        return 1.0
    return upper_gamma(degrees_of_freedom / 2, x / 2)


def upper_gamma(a: float, x: float) -> float:
    """The regularised upper incomplete gamma function: the tail of a gamma distribution of shape a beyond x."""
    if x <= 0:
        return 1.0
    if math.isinf(x):
        return 0.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    return 1 - scale * _lower_series(a, x) if x < a + 1 else scale * _upper_fraction(a, x)


def _lower_series(a: float, x: float) -> float:
    """Converges quickly below the mean."""
    term = total = 1 / a
    while term > total * PRECISION:
        a += 1
        term *= x / a
        total += term
    return total


def _upper_fraction(a: float, x: float) -> float:
    """A continued fraction that converges quickly above the mean, by Lentz's method."""
    b = x + 1 - a
    numerator, denominator = 1 / TINY, 1 / b
    value = denominator
    for step in range(1, MAX_TERMS):
        factor = -step * (step - a)
        b += 2
        denominator = 1 / (factor * denominator + b or TINY)
        numerator = b + factor / numerator or TINY
        change = denominator * numerator
        value *= change
        if abs(change - 1) < PRECISION:
            break
    return value


def chi2_quantile(alpha: float, degrees_of_freedom: int) -> float:
    """The x with P(chi² >= x) = alpha."""
    low, high = 0.0, 10.0
    while chi2_tail(high, degrees_of_freedom) > alpha:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if chi2_tail(middle, degrees_of_freedom) > alpha else (low, middle)
    return (low + high) / 2


def power(distance: float, draws: int, degrees_of_freedom: int, alpha: float) -> float:
    """A lower bound on the probability that an output `distance` (total variation) away from the target's is found.

    A deviation d of total variation t has Σ d²/p >= (Σ|d|)² = 4t², so the test statistic's non-centrality is at least
    4·draws·t²: a bound that holds for every kind of error.
    """
    threshold = chi2_quantile(alpha, degrees_of_freedom)
    return _noncentral_tail(threshold, 2 * draws * distance * distance, degrees_of_freedom)


def _noncentral_tail(threshold: float, shift: float, degrees_of_freedom: int) -> float:
    """P(non-central chi² >= threshold); `shift` is half the non-centrality."""
    a, x = degrees_of_freedom / 2, threshold / 2
    total, tail = 0.0, upper_gamma(a, x)
    # The non-central distribution is a Poisson mixture of central ones, whose tails follow from one another.
    for step in range(int(shift + 10 * math.sqrt(shift + 1) + 10)):
        total += _poisson(step, shift) * tail
        tail += _poisson(a + step, x)
    return min(total, 1.0)


def _poisson(count: float, mean: float) -> float:
    """mean^count · e^-mean / Γ(count + 1)."""
    if mean <= 0:
        return 0.0 if count else 1.0
    return math.exp(count * math.log(mean) - mean - math.lgamma(count + 1))


def detectable_distance(draws: int, degrees_of_freedom: int, alpha: float, certainty: float = 0.95) -> float:
    """The least total variation that is found with probability `certainty`."""
    low, high, threshold = 0.0, 1.0, chi2_quantile(alpha, degrees_of_freedom)
    for _ in range(12):
        middle = (low + high) / 2
        power_at = _noncentral_tail(threshold, 2 * draws * middle**2, degrees_of_freedom)
        low, high = (middle, high) if power_at < certainty else (low, middle)
    return high


def against_exact(counts: Counter[Event], exact: Mapping[Event, float]) -> GoodnessOfFit:
    """Pearson's chi² of counts against exact probabilities. A draw of probability 0 is proof by itself: p = 0."""
    draws = sum(counts.values())
    distance = _distance(counts, exact, draws)
    if any(exact.get(event, 0.0) <= 0.0 for event in counts):
        return GoodnessOfFit(draws, math.inf, 2, 0.0, distance)
    cells = _pooled(counts, exact, draws)
    chi2 = sum((cell.observed - cell.expected) ** 2 / cell.expected for cell in cells)
    p_value = chi2_tail(chi2, len(cells) - 1) if len(cells) > 1 else 1.0
    return GoodnessOfFit(draws, chi2, len(cells), p_value, distance)


@dataclass(slots=True)
class _Cell:
    """Draws that fell into one cell, and draws expected there."""

    observed: float
    expected: float


def _pooled(counts: Mapping[Event, int], exact: Mapping[Event, float], draws: int) -> list[_Cell]:
    """Cells that each expect enough draws; the rarest events share cells."""
    cells: list[_Cell] = []
    for event, probability in sorted(exact.items(), key=lambda pair: pair[1]):
        if probability <= 0:
            continue
        if cells and cells[-1].expected < LEAST_EXPECTED:
            cells[-1].observed += counts.get(event, 0)
            cells[-1].expected += probability * draws
        else:
            cells.append(_Cell(counts.get(event, 0), probability * draws))
    return cells


def _distance(counts: Mapping[Event, int], exact: Mapping[Event, float], draws: int) -> float:
    events = set(counts) | set(exact)
    return sum(abs(counts.get(event, 0) / draws - exact.get(event, 0.0)) for event in events) / 2
