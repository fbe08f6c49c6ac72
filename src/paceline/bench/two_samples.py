"""Whether two sets of outputs come from one distribution, by tests that are exact at any number of draws.

each event    how often an output, its first character or one of its first words came on either side: Fisher's exact
              test, corrected for the number of events that are frequent enough to show anything (Tarone)
all together  how unevenly the outputs are divided between the two sides: a permutation test
repetition    how much more often one side repeats itself: a permutation test. Another temperature changes every
              output's probability a little, which the other two hardly see, and all in one direction

None needs large counts. The first has half of the level and the others a quarter each, so together they raise a false
alarm with at most that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from paceline.bench.outcome import CERTAINTY

NUM_WORDS = 3  # of an output, that are compared one by one
FIRST_PERMUTATIONS = 500
MAX_PERMUTATIONS = 400_000  # levels below 1 / this are left to the test of each event
NOT_WORTH_MORE = 0.02  # a first estimate above this will not fall below any level in use
MAX_ELEMENTS = 2_000_000  # of an array of permutations
NUM_STATISTICS = 2  # of the permutation tests
SIMULATIONS = 400
SHARES = tuple(step / 50 for step in range(1, 51))  # differences that are tried, smallest first


@dataclass(frozen=True, slots=True)
class Event:
    """Something an output may have, and how often it had it on either side."""

    name: str
    value: str
    first: int
    second: int


@dataclass(frozen=True, slots=True)
class TwoSampleResult:
    """p_value: corrected for all tests and events; furthest: the event with the smallest p-value by itself.

    num_testable  the events that were frequent enough to be tested
    """

    p_value: float
    furthest: Event
    num_testable: int


def compare_samples(first: Counter[str], second: Counter[str], level: float, seed: int = 0) -> TwoSampleResult:
    """All tests. A p-value below `level` is a difference."""
    n, m = first.total(), second.total()
    events = list(events_of(first, second))
    num_testable = tested_events(events, n, m, level / 2)
    p_values = [fisher(event.first, event.second, n, m) for event in events]
    smallest = min(p_values)
    p_value = min(1.0, 2 * num_testable * smallest)
    if p_value >= level:  # nothing is decided yet
        p_value = min(p_value, 2 * permutation_p(first, second, level / 2, seed))
    return TwoSampleResult(p_value, events[p_values.index(smallest)], num_testable)


def events_of(first: Counter[str], second: Counter[str]) -> Iterator[Event]:
    """Whole outputs, first characters and single words. Coarse ones show what outputs that never repeat cannot."""
    for name in ("output", "first character", *(f"word {number + 1}" for number in range(NUM_WORDS))):
        left, right = _read(first, name), _read(second, name)
        for value in left | right:
            yield Event(name, value, left[value], right[value])


def _read(counts: Counter[str], name: str) -> Counter[str]:
    readings: Counter[str] = Counter()
    for text, count in counts.items():
        readings[_reading(text, name)] += count
    return readings


def _reading(text: str, name: str) -> str:
    if name == "output":
        return text
    if name == "first character":
        return text.strip()[:1]
    words = text.split()
    number = int(name.split()[1])
    return words[number - 1] if len(words) >= number else ""


# --- one event --------------------------------------------------------------------------------------------------------


@cache
def fisher(a: int, b: int, n: int, m: int) -> float:
    """Fisher's exact test, two-sided: a of n against b of m."""
    probabilities = _hypergeometric(a + b, n, m)
    observed = probabilities[a - max(0, a + b - m)]
    return min(1.0, float(probabilities[probabilities <= observed * (1 + 1e-7)].sum()))


@cache
def least_p(total: int, n: int, m: int) -> float:
    """The smallest p-value that an event which came `total` times can have."""
    probabilities = _hypergeometric(total, n, m)
    return float(probabilities[probabilities <= probabilities.min() * (1 + 1e-7)].sum())


def _hypergeometric(total: int, n: int, m: int) -> NDArray[np.float64]:
    """The probability of each possible count on the first side, if `total` are spread at random over n + m draws."""
    counts = np.arange(max(0, total - m), min(n, total) + 1)
    log = _log_factorials(n + m)
    chosen = log[n] - log[counts] - log[n - counts]
    others = log[m] - log[total - counts] - log[m - total + counts]
    return np.asarray(np.exp(chosen + others - (log[n + m] - log[total] - log[n + m - total])))


@cache
def _log_factorials(largest: int) -> NDArray[np.float64]:
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, largest + 1)))])


def tested_events(events: list[Event], n: int, m: int, level: float) -> int:
    """Tarone's number: events that could not reach level / number whatever happens need no share of the level."""
    least = sorted(least_p(event.first + event.second, n, m) for event in events)
    number = 1
    while sum(p <= level / number for p in least) > number:
        number += 1
    return number


# --- all together -----------------------------------------------------------------------------------------------------


def permutation_p(first: Counter[str], second: Counter[str], level: float, seed: int = 0) -> float:
    """The share of random divisions of all outputs into two sides that are at least as uneven as this one, or in which
    one side repeats itself as much more than the other: twice the smaller of the two shares.

    Never 0: the division at hand counts as one of them. Far more divisions are tried where the first few look rare.
    """
    rng = np.random.default_rng(seed)
    divisions = _Divisions.of(first, second)
    p_value = divisions.p_value(first, rng, FIRST_PERMUTATIONS)
    if p_value > NOT_WORTH_MORE:
        return p_value
    return divisions.p_value(first, rng, min(math.ceil(4 * NUM_STATISTICS / level), MAX_PERMUTATIONS))


@dataclass(frozen=True, slots=True)
class _Divisions:
    """All outputs of both sides, to be divided again at random.

    repeated  outputs that came more than once; totals: how often each
    singles   outputs that came once: only how many of them are on the first side matters
    """

    repeated: list[str]
    totals: NDArray[np.int64]
    singles: int
    n: int
    m: int

    @classmethod
    def of(cls, first: Counter[str], second: Counter[str]) -> _Divisions:
        both = first + second
        repeated = [text for text, count in both.items() if count > 1]
        totals = np.array([both[text] for text in repeated], dtype=np.int64)
        return cls(repeated, totals, len(both) - len(repeated), first.total(), second.total())

    def p_value(self, first: Counter[str], rng: np.random.Generator, permutations: int) -> float:
        counts = np.array([*(first[text] for text in self.repeated), 0], dtype=np.int64)
        counts[-1] = self.n - counts.sum()
        observed = self._statistics(counts[None]) - 1e-9  # [statistics, 1]
        chunk = max(1, MAX_ELEMENTS // len(counts))
        as_extreme, remaining = np.ones(NUM_STATISTICS), permutations
        while remaining:
            size = min(chunk, remaining)
            divisions = rng.multivariate_hypergeometric([*self.totals, self.singles], self.n, size, method="marginals")
            as_extreme += (self._statistics(divisions) >= observed).sum(1)
            remaining -= size
        return min(1.0, NUM_STATISTICS * float(as_extreme.min()) / (permutations + 1))

    def _statistics(self, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """counts [divisions, repeated + 1]: on the first side, the singles last. Returns [statistics, divisions]."""
        repeated, singles = counts[:, :-1], counts[:, -1]
        return np.stack([self._unevenness(repeated, singles), self._repetition(repeated)])

    def _unevenness(self, repeated: NDArray[np.int64], singles: NDArray[np.int64]) -> NDArray[np.float64]:
        """Pearson's chi², less a constant factor."""
        share = self.n / (self.n + self.m)
        uneven = ((repeated - share * self.totals) ** 2 / self.totals).sum(1)
        return np.asarray(uneven + singles * (1 - share) ** 2 + (self.singles - singles) * share**2)

    def _repetition(self, repeated: NDArray[np.int64]) -> NDArray[np.float64]:
        """How far apart the two sides are in the share of pairs of draws that are equal."""
        others = self.totals - repeated
        first = (repeated * (repeated - 1)).sum(1) / max(1, self.n * (self.n - 1))
        second = (others * (others - 1)).sum(1) / max(1, self.m * (self.m - 1))
        return np.asarray(np.abs(first - second))


# --- power ------------------------------------------------------------------------------------------------------------


def disjoint_would_be_found(first: Counter[str], second: Counter[str], level: float) -> bool:
    """Whether two sides as diverse as these, with no output in common, would be told apart by how unevenly they are
    divided.

    Outputs that never repeat cannot be: two samples of one wide distribution look just like that.
    """
    totals = [*first.values(), *second.values()]
    return 2 * NUM_STATISTICS * separation_p(totals, first.total()) < level


def separation_p(totals: list[int], n: int) -> float:
    """The probability that a random division, n to the first side, puts all outputs of a kind on one side."""
    ways = np.zeros(n + 1)  # the product of (1 + x^total) / 2 over all kinds
    ways[0] = 1.0
    for total in totals:
        moved = np.zeros_like(ways)
        moved[total:] = ways[: max(0, n + 1 - total)]
        ways = (ways + moved) / 2
    if not ways[n]:
        return 0.0
    log = _log_factorials(sum(totals))
    divisions = log[-1] - log[n] - log[sum(totals) - n]
    return math.exp(min(0.0, math.log(ways[n]) + len(totals) * math.log(2) - divisions))


def detectable_share(
    first: Counter[str], second: Counter[str], level: float, num_testable: int, seed: int = 0
) -> float:
    """The least change in the commonest output's probability that is found with CERTAINTY, by simulation."""
    n, m = first.total(), second.total()
    common = max((first + second).values()) / (n + m)
    rng = np.random.default_rng(seed)
    edge = level / 2 / num_testable
    low, high = 0, len(SHARES) - 1
    while low < high:
        middle = (low + high) // 2
        found = _found(common, SHARES[middle], n, m, edge, rng) >= CERTAINTY
        low, high = (low, middle) if found else (middle + 1, high)
    return SHARES[low]


def _found(common: float, share: float, n: int, m: int, edge: float, rng: np.random.Generator) -> float:
    """How often the change is found, for the less conspicuous of the two directions that are possible."""
    rates = []
    for changed in (common + share, common - share):
        if 0 <= changed <= 1:
            pairs = zip(rng.binomial(n, changed, SIMULATIONS).tolist(), rng.binomial(m, common, SIMULATIONS).tolist())
            rates.append(sum(fisher(a, b, n, m) <= edge for a, b in pairs) / SIMULATIONS)
    return min(rates, default=1.0)
