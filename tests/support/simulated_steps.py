"""Steps under a made-up clock: true costs, true acceptance, and a policy that has to find the best k by itself.

A policy sees seconds with noise, and now and then a hiccup. What it achieves is computed from the true costs and the
expected tokens of the ks that it chose, so luck of single draft tokens does not count.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from paceline.core.cost_model import CostCurve, CostModel, StepTiming, draft_curve
from paceline.core.draft_length import DraftLengthPolicy
from paceline.core.draft_tree import chain, empty
from paceline.core.sequence import Sequence
from paceline.core.types import RowOutput, StepResult, VerifyResult
from tests.support.build import sequence

NO_OUTPUT = RowOutput(torch.empty(0, 0))
MAX_K = 16
MEASURED_WIDTHS = tuple(range(1, 18))
PLAIN_SECONDS = 0.005  # what a cost of 1.0 stands for: a hiccup of 500 ms is a hundred plain steps


@dataclass(frozen=True, slots=True)
class TrueCosts:
    """Costs in plain passes: of a pass by its width, of a draft token, of a token that the drafter has not read."""

    verify: Callable[[int], float]
    draft: float
    acceptance: float
    catch_up: float = 0.0
    noise: float = 0.0

    def step(self, k: int) -> float:
        return self.verify(k + 1) + self.draft * k

    def tokens(self, k: int) -> float:
        """Expected tokens of a step."""
        return float(sum(self.acceptance**depth for depth in range(k + 1)))

    def rate(self, k: int) -> float:
        return self.tokens(k) / self.step(k)

    @property
    def best_rate(self) -> float:
        return max(self.rate(k) for k in range(MAX_K + 1))

    def measured(self, dice: random.Random) -> CostModel:
        """What a measurement at load returns, two passes of each width."""
        verify = {width: self._mean(self.verify(width), dice) for width in MEASURED_WIDTHS}
        draft = {k: self._mean(self.draft * k, dice) for k in (1, 8)}
        return CostModel(CostCurve(verify), draft_curve(draft), catch_up=self._mean(self.catch_up, dice))

    def _mean(self, cost: float, dice: random.Random) -> float:
        return (self.sample(cost, dice) + self.sample(cost, dice)) / 2

    def sample(self, cost: float, dice: random.Random) -> float:
        return PLAIN_SECONDS * cost * max(0.2, 1 + self.noise * dice.gauss(0, 1))


@dataclass(frozen=True, slots=True)
class Hiccup:
    """Half a second that one observation takes longer."""

    step: int
    observed: str  # draft, verify, or catch_up: the first drafting step from `step` on that has tokens to catch up with
    seconds: float = 0.5


@dataclass(slots=True)
class Run:
    """What a policy did: its ks, what they cost and what they should bring, in plain passes and tokens."""

    ks: list[int] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)

    def rate(self, first: int = 0, last: int | None = None) -> float:
        return sum(self.tokens[first:last]) / sum(self.costs[first:last])


class Simulation:
    """One engine: sequences one after another under one policy."""

    def __init__(
        self,
        policy: DraftLengthPolicy,
        costs: TrueCosts,
        seed: int = 0,
        hiccup: Hiccup | None = None,
        unclean_steps: int = 0,
    ) -> None:
        """unclean_steps: at the start, each of which captures something for a second, and is marked.

        hiccup: then draft tokens are accepted evenly, not by chance, so that nothing but the hiccup disturbs.
        """
        self.policy, self.truth, self.hiccup = policy, costs, hiccup
        self.dice, self._even = random.Random(seed), hiccup is not None
        self._unclean_steps = unclean_steps
        self._shares = [0.5] * MAX_K  # of an accepted draft token that are due at each depth
        self.run = Run()

    def generate(self, num_tokens: int, prompt_length: int = 1, steps: int | None = None) -> Run:
        """A fresh sequence until it ends, or for so many steps."""
        seq, num_read, first = sequence([1] * prompt_length, num_tokens), 0, len(self.run.ks)
        while not seq.finished and (steps is None or len(self.run.ks) - first < steps):
            [k] = self.policy.plan([seq])
            self._step(seq, k, len(seq.ids) - 1 - num_read if k else 0)
            num_read = len(seq.ids) - 1 if k else num_read
        self.policy.forget(seq)
        return self.run

    def _step(self, seq: Sequence, k: int, unread: int) -> None:
        truth, dice = self.truth, self.dice
        accepted = next((depth for depth in range(k) if not self._is_accepted(depth)), k)
        emitted = seq.extend([2] * (accepted + 1), accepted)
        tree = chain([0] * k) if k else empty()
        result = StepResult(tree, VerifyResult(list(range(accepted)), 2), NO_OUTPUT, emitted, accepted)
        self.run.ks.append(k)
        self.run.costs.append(truth.step(k) + truth.catch_up * unread)
        self.run.tokens.append(truth.tokens(k))
        draft = truth.sample(truth.draft * k + truth.catch_up * unread, dice)
        timing = StepTiming(draft, truth.sample(truth.verify(k + 1), dice), k + 1, k, 1)
        self.policy.observe([seq], [result], self._held_up(timing, unread))

    def _is_accepted(self, depth: int) -> bool:
        if not self._even:
            return self.dice.random() < self.truth.acceptance
        self._shares[depth] += self.truth.acceptance
        accepted = self._shares[depth] >= 1.0
        self._shares[depth] -= accepted
        return accepted

    def _held_up(self, timing: StepTiming, unread: int) -> StepTiming:
        if len(self.run.ks) <= self._unclean_steps:
            return replace(timing, draft_seconds=1.0, verify_seconds=1.0, clean=False)
        hiccup = self.hiccup
        if hiccup is None or len(self.run.ks) <= hiccup.step or not _concerns(hiccup, timing, unread):
            return timing
        self.hiccup = None
        if hiccup.observed == "verify":
            return replace(timing, verify_seconds=timing.verify_seconds + hiccup.seconds)
        return replace(timing, draft_seconds=timing.draft_seconds + hiccup.seconds)


def _concerns(hiccup: Hiccup, timing: StepTiming, unread: int) -> bool:
    drafted = timing.num_draft_tokens > 0
    return {"verify": True, "draft": drafted, "catch_up": drafted and unread > 16}[hiccup.observed]


def affine(slope: float) -> Callable[[int], float]:
    return lambda width: 1.0 + slope * (width - 1)


def stepped(edge: int, rise: float) -> Callable[[int], float]:
    """A kernel that takes `edge` tokens at a time."""
    return lambda width: 1.0 + rise * ((width - 1) // edge)
