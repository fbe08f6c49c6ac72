"""Acceptance of a reading by position, and whether one reading is better than another on the same anchors.

Neighbouring anchors share most of their tokens, so differences are summed over runs of anchors first, and the runs
are taken as independent. The statistic is Student's t over the runs, given as the normal deviate of the same tail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

RUN = 16  # neighbouring anchors that count as one observation
FEWEST_RUNS = 4


@dataclass(frozen=True, slots=True, eq=False)
class Acceptance:
    """What was accepted of a reading's drafts. lengths: int64 [anchors], accepted draft tokens of each chain."""

    lengths: Tensor
    k: int

    @classmethod
    def of(cls, drafts: Tensor, labels: Tensor) -> Acceptance:
        return cls((drafts == labels).long().cumprod(dim=-1).sum(dim=-1).cpu(), labels.shape[1])

    @property
    def num_anchors(self) -> int:
        return int(self.lengths.shape[0])

    @property
    def by_position(self) -> list[float]:
        """Share of the chains that reach each position."""
        reached = [int((self.lengths > position).sum()) for position in range(self.k)]
        return [count / max(1, self.num_anchors) for count in reached]

    @property
    def errors(self) -> list[float]:
        """Binomial standard errors of by_position."""
        return [math.sqrt(rate * (1 - rate) / max(1, self.num_anchors)) for rate in self.by_position]

    @property
    def tokens_per_step(self) -> float:
        return 1 + sum(self.by_position)


def normal_deviate(difference: Tensor) -> float:
    """How far the mean of paired differences is from 0. difference: [anchors], in the order of the text."""
    runs = difference.float()[: len(difference) // RUN * RUN].view(-1, RUN).mean(dim=1)
    count = len(runs)
    if count < FEWEST_RUNS or not bool(runs.any()):
        return 0.0
    spread = float(runs.std())
    if spread == 0:
        return math.copysign(math.inf, float(runs.mean()))
    return normal_of_student(float(runs.mean()) / spread * math.sqrt(count), count - 1)


def normal_of_student(t: float, degrees_of_freedom: int) -> float:
    """The normal deviate with the tail of Student's t, by Wallace's formula."""
    n = degrees_of_freedom
    return math.copysign((8 * n + 1) / (8 * n + 3) * math.sqrt(n * math.log1p(t * t / n)), t)


def normal_tail(z: float) -> float:
    """P(a normal variable >= z)."""
    return 0.5 * math.erfc(z / math.sqrt(2))


def error_probability(z: float, tests: int) -> float:
    """The chance that the largest of so many deviates is at least z although no reading is better (Bonferroni)."""
    return min(1.0, tests * normal_tail(z))


def paired(first: Acceptance, second: Acceptance) -> float:
    """The deviate of `first` over `second`; both on the same anchors. Positive: `first` is better."""
    assert first.num_anchors == second.num_anchors
    return normal_deviate(torch.sub(first.lengths, second.lengths))
