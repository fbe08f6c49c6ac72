"""How often draft tokens of a given confidence are accepted, learned from the steps that run.

A drafter states a confidence for each draft token: the probability of its best token, a match length turned into a
number, the output of a confidence head. What it means is measured: a table of a few bins holds how often draft tokens
of that confidence were accepted, given that all before them were. Until there are counts a confidence is believed, as
far as drafts of all confidences together were accepted as often as they said.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from math import inf
from operator import mul

EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.78, 0.84, 0.9, 0.95, 0.98)
NUM_BINS = len(EDGES) + 1
CENTRES = tuple((low + high) / 2 for low, high in zip((0.0, *EDGES), (*EDGES, 1.0)))
BIN_STARTS = (0.0, *EDGES, inf)  # and behind the last bin: no confidence is enough
PRIOR_WEIGHT = 4.0  # draft tokens that the prior counts for
SHIFT_WEIGHT = 2.0  # draft tokens of either outcome that count as stated beside all that were verified
FADE = 0.998  # of a bin's counts, by each draft token that falls into it
NEWS, MAX_NEWS = 1 / 64, 8  # draft tokens, of all: with fewer new ones the rates stay as they are


@dataclass(slots=True)
class ConfidenceTable:
    """Confidence -> acceptance, never falling: where counts say otherwise, neighbouring bins are pooled.

    prior  the table that bins without counts lean on; None: the confidence itself
    """

    prior: ConfidenceTable | None = None
    fade: float = FADE
    weight: float = PRIOR_WEIGHT
    _verified: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)
    _accepted: list[float] = field(default_factory=lambda: [0.0] * NUM_BINS)
    _total: int = 0  # draft tokens that were observed
    _new: int = 0  # since the rates were made
    _rates: tuple[float, ...] | None = None  # of all bins

    def observe(self, confidence: float, accepted: bool) -> None:
        """A draft token of this confidence was verified, all before it accepted."""
        index = bin_of(confidence)
        self._verified[index] = self._verified[index] * self.fade + 1.0
        self._accepted[index] = self._accepted[index] * self.fade + accepted
        self._total += 1
        self._new += 1
        if self.prior is not None:
            self.prior.observe(confidence, accepted)

    def rate(self, confidence: float) -> float:
        """The share of draft tokens of this confidence that are accepted."""
        index = bin_of(confidence)
        if self.prior is not None:  # few counts of one sequence: pooling them would only add noise
            return self._shrunk(index, self.prior.rate(confidence))
        return self._latest()[index]

    def rates(self, confidences: list[float]) -> list[float]:
        """The same of some draft tokens. Of a table without a prior."""
        latest = self._latest()
        return [latest[bin_of(confidence)] for confidence in confidences]

    def least_confidence(self, rate: float) -> float:
        """The lowest confidence, by the edges of bins, whose draft tokens are accepted at least so often. Of a table
        without a prior."""
        return BIN_STARTS[bisect_left(self._latest(), rate)]  # they never fall

    def _latest(self) -> tuple[float, ...]:
        """The rates of all bins, made again where there is news."""
        if self._rates is None or self._new > min(NEWS * self._total, MAX_NEWS):
            self._rates, self._new = self._pooled(), 0
        return self._rates

    def _shrunk(self, index: int, prior: float) -> float:
        return (self._accepted[index] + self.weight * prior) / (self._verified[index] + self.weight)

    def _odds_ratio(self) -> float:
        """By how much the odds of all draft tokens together were better than stated."""
        count, accepted = sum(self._verified), sum(self._accepted)
        stated = sum(map(mul, self._verified, CENTRES))
        found = (accepted + SHIFT_WEIGHT) / (count - accepted + SHIFT_WEIGHT)
        return float(found * (count - stated + SHIFT_WEIGHT) / (stated + SHIFT_WEIGHT))

    def _pooled(self) -> tuple[float, ...]:
        """Rates of all bins by pool-adjacent-violators. After every draft, so neighbours are pooled in plain lists."""
        rates: list[float] = []
        weights: list[float] = []
        sizes: list[int] = []  # bins with one rate
        ratio = self._odds_ratio()
        for index, centre in enumerate(CENTRES):
            believed = ratio * centre / (1.0 - centre + ratio * centre)
            rate, weight, size = self._shrunk(index, believed), self._verified[index] + self.weight, 1
            while rates and rates[-1] > rate:
                other = weights.pop()
                rate = (rates.pop() * other + rate * weight) / (other + weight)
                weight, size = other + weight, sizes.pop() + size
            rates.append(rate)
            weights.append(weight)
            sizes.append(size)
        return tuple([rate for rate, size in zip(rates, sizes) for _ in range(size)])


def bin_of(confidence: float) -> int:
    return bisect_right(EDGES, confidence)
