"""Acceptance of a reading by position, and whether one reading is better than another on the same anchors.

Two readings are compared by what is accepted of their likeliest tokens, and by the draft tokens expected to be accepted
if they were drawn from the head's distribution; the clearer of the two counts. Most wrong readings change few of the
likeliest tokens, but the probabilities of nearly all, so the second tells them apart on a shorter text. The first does
for heads whose probabilities are far from the target's.

Neighbouring anchors share most of their tokens, so differences are summed over runs of anchors first, and the runs
are taken as independent. The statistic is Student's t over the runs, given as the normal deviate of the same tail.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.train.teacher import draft_ids_of

RUN = 16  # neighbouring anchors that count as one observation
FEWEST_RUNS = 4
STATISTICS = 2  # accepted lengths and expected ones, of which the clearer counts: two tests


@dataclass(frozen=True, slots=True, eq=False)
class DraftedTokens:
    """A head's drafts along a text.

    tokens  int64 [anchors, k]: the likeliest at each place, -1 where the head drafts fewer
    probs   [anchors, k]: what the head gives to the token that the target predicts there
    """

    tokens: Tensor
    probs: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Acceptance:
    """What is accepted of a reading's drafts.

    lengths   int64 [anchors]: accepted draft tokens of each chain of likeliest tokens
    expected  [anchors]: accepted draft tokens to be expected of a chain that is drawn
    """

    lengths: Tensor
    expected: Tensor
    k: int

    @classmethod
    def of(cls, drafts: DraftedTokens, labels: Tensor) -> Acceptance:
        lengths = (drafts.tokens == labels).long().cumprod(dim=-1).sum(dim=-1)
        expected = drafts.probs.float().cumprod(dim=-1).sum(dim=-1)
        return cls(lengths.cpu(), expected.cpu(), labels.shape[1])

    @classmethod
    def nothing(cls, num_anchors: int, k: int) -> Acceptance:
        """Of a head that does not draft."""
        return cls(torch.zeros(num_anchors, dtype=torch.int64), torch.zeros(num_anchors), k)

    def first(self, num_anchors: int) -> Acceptance:
        """On the first anchors alone."""
        return Acceptance(self.lengths[:num_anchors], self.expected[:num_anchors], self.k)

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


def own_ids(labels: Tensor, target_ids: Tensor, vocab_size: int) -> Tensor:
    """Tokens of the target as ids of a head's own vocabulary, -1 for those it cannot predict.

    target_ids: int64 [draft_vocab_size], the target's id of each of the head's tokens; a wrong map may leave the range
    """
    outside = (target_ids < 0) | (target_ids >= vocab_size)
    return draft_ids_of(target_ids.masked_fill(outside, vocab_size), vocab_size + 1)[labels]


def probs_of(logits: Tensor, ids: Tensor) -> Tensor:
    """What a distribution gives to these ids; 0 where an id is -1. logits [..., vocab_size], ids [...]"""
    chosen = logits.gather(-1, ids.clamp(min=0)[..., None]).squeeze(-1)
    return torch.where(ids >= 0, (chosen - logits.logsumexp(dim=-1)).exp(), 0.0)


def run_means(difference: Tensor) -> Tensor:
    """Paired differences, [anchors] in the order of the text, as means of runs of neighbours."""
    return difference.float()[: len(difference) // RUN * RUN].view(-1, RUN).mean(dim=1)


def most_gained(first: Acceptance, second: Acceptance, deviates: float) -> float:
    """A bound on how many more of `first`'s draft tokens are accepted than of `second`'s, so many errors away."""

    def bound(difference: Tensor) -> float:
        runs = run_means(difference)
        if len(runs) < FEWEST_RUNS:
            return math.inf
        return float(runs.mean()) + deviates * float(runs.std()) / math.sqrt(len(runs))

    return max(bound(first.expected - second.expected), bound(torch.sub(first.lengths, second.lengths)))


def normal_deviate(difference: Tensor) -> float:
    """How far the mean of paired differences is from 0. difference: [anchors], in the order of the text."""
    runs = run_means(difference)
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


def accepts_more(first: Acceptance, second: Acceptance) -> float:
    """The deviate of `first` over `second` by accepted tokens; both on the same anchors. Positive: better."""
    assert first.num_anchors == second.num_anchors
    return normal_deviate(torch.sub(first.lengths, second.lengths))


def paired(first: Acceptance, second: Acceptance) -> float:
    """The deviate of `first` over `second`, the larger of STATISTICS; both on the same anchors. Positive: better."""
    return max(normal_deviate(first.expected - second.expected), accepts_more(first, second))
