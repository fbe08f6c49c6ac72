"""How many tokens to guess next.

A budget sees only what has already happened: the k of a round never depends on the guesses of that round. That is
what keeps the output exact (see `tests/core/test_budget.py` for the counterexample that breaks it).

fixed      the same k every round
adaptive   the k that has paid best lately, from acceptance by position and the cost of a pass by width
           With costs that were really measured this is also the never-lose rule: k falls to 0 where guessing does not
           pay, and a probe now and then, never more than a small share of the time, finds out whether it pays again.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.protocols import Round
from paceline.core.sequence import Sequence
from paceline.core.tree import depths
from paceline.options import checked_k


@dataclass(frozen=True, slots=True)
class Timing:
    """What one round cost. nodes: tokens read by the target in the pass; guesses: the longest chain drafted."""

    draft_seconds: float
    verify_seconds: float
    nodes: int
    guesses: int
    texts: int


class Budget(Protocol):
    """Decides k before a round, learns after it."""

    def plan(self, texts: list[Sequence]) -> list[int]:
        """k for each text of the next round."""

    def observe(self, texts: list[Sequence], rounds: list[Round], timing: Timing) -> None:
        """What the round brought, and what it cost."""

    def forget(self, text: Sequence) -> None:
        """The text is over."""


def within_room(text: Sequence, k: int) -> int:
    """Never guess past the end: a round writes at most k + 1 tokens. A text's own k goes before the budget's."""
    wanted = k if text.draft_tokens is None else text.draft_tokens
    return max(0, min(wanted, text.room - 1))


class FixedBudget:
    """The same k every round."""

    def __init__(self, k: int) -> None:
        self.k = checked_k(k)

    def plan(self, texts: list[Sequence]) -> list[int]:
        return [within_room(text, self.k) for text in texts]

    def observe(self, texts: list[Sequence], rounds: list[Round], timing: Timing) -> None:
        pass

    def forget(self, text: Sequence) -> None:
        pass


# --- costs ------------------------------------------------------------------------------------------------------------


class CostCurve:
    """Seconds of a pass by the number of tokens in it: straight lines between what was seen, smoothed over time."""

    WEIGHT = 0.2  # of a new sample

    def __init__(self, seen: dict[int, float] | None = None) -> None:
        self._seen = dict(seen or {})

    def add(self, nodes: int, seconds: float) -> None:
        before = self._seen.get(nodes)
        if before is not None and seconds > 4 * before:
            return  # a hiccup of the machine, not the price of a pass
        self._seen[nodes] = seconds if before is None else before + self.WEIGHT * (seconds - before)

    def at(self, nodes: int) -> float:
        known = sorted(self._seen)
        if not known:
            return 1.0
        right = bisect_left(known, nodes)
        if right == 0:
            return self._seen[known[0]]
        low = known[right - 1]
        if right == len(known):
            # Beyond what was seen, cost can only be assumed to grow in proportion: the cautious guess.
            slope = self._seen[low] / low if len(known) == 1 else self._slope(known[-2], low)
            return self._seen[low] + max(0.0, slope) * (nodes - low)
        return self._seen[low] + self._slope(low, known[right]) * (nodes - low)

    def _slope(self, low: int, high: int) -> float:
        return (self._seen[high] - self._seen[low]) / (high - low)

    def as_dict(self) -> dict[int, float]:
        return dict(sorted(self._seen.items()))


@dataclass(slots=True)
class Costs:
    """What a round costs: the target's pass by width, and the draft by its number of steps."""

    verify: CostCurve = field(default_factory=CostCurve)
    draft: CostCurve = field(default_factory=CostCurve)  # keyed by k; 0 is free

    def observe(self, timing: Timing) -> None:
        self.verify.add(timing.nodes, timing.verify_seconds)
        if timing.guesses:
            self.draft.add(timing.guesses, timing.draft_seconds)

    def round(self, nodes: int, guesses: int) -> float:
        return self.verify.at(nodes) + (self.draft.at(guesses) if guesses else 0.0)


# --- acceptance -------------------------------------------------------------------------------------------------------


class PositionRates:
    """How often a guess at each depth stands, given that all before it stood. Old rounds fade."""

    def __init__(self, fade: float = 0.95, prior: float = 0.7, weight: float = 2.0) -> None:
        self.fade = fade
        self._prior, self._weight = prior, weight
        self._tried: list[float] = []
        self._stood: list[float] = []

    def observe(self, reach: int, accepted: int) -> None:
        """A round offered `reach` depths and `accepted` of them stood."""
        tried = min(reach, accepted + 1)  # the depth that failed was tried; those behind it were not
        while len(self._tried) < tried:
            self._tried.append(0.0)
            self._stood.append(0.0)
        for depth in range(tried):
            self._tried[depth] = self._tried[depth] * self.fade + 1.0
            self._stood[depth] = self._stood[depth] * self.fade + (1.0 if depth < accepted else 0.0)

    def at(self, depth: int) -> float:
        """A depth seldom tried leans on the one before it."""
        prior = self._prior if depth == 0 else self.at(min(depth, len(self._tried)) - 1)
        if depth >= len(self._tried):
            return prior
        return (self._stood[depth] + self._weight * prior) / (self._tried[depth] + self._weight)

    def expected_tokens(self, k: int) -> float:
        """Tokens a round of k guesses writes: 1 + a_1 + a_1·a_2 + …"""
        total, product = 1.0, 1.0
        for depth in range(k):
            product *= self.at(depth)
            total += product
        return total


# --- adaptive ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _TextState:
    rates: PositionRates
    idle: int = 0  # rounds without a guess since the last one
    gap: int = 8  # rounds to wait before the next probe


class AdaptiveBudget:
    """The k that maximises tokens per second for the whole batch, from what was observed.

    Texts are given guesses one at a time, each to whom it brings the most expected tokens, as long as the batch's
    tokens per second rises; so a hopeless text costs its neighbours nothing. A text left at 0 is probed with
    PROBE_K guesses after a gap that doubles while probes fail; probes never take more than PROBE_SHARE of the time.
    """

    PROBE_K = 2
    PROBE_SHARE = 0.015
    MARGIN = 1.02  # guessing must promise at least this much over plain decoding
    LONGEST_GAP = 512

    def __init__(self, costs: Costs | None = None, largest: int = 8) -> None:
        self.costs = costs or Costs()
        self.largest = checked_k(largest)
        self._overall = PositionRates(fade=0.98)
        self._texts: dict[int, _TextState] = {}

    def plan(self, texts: list[Sequence]) -> list[int]:
        states = [self._state(text) for text in texts]
        limits = [within_room(text, self.largest) for text in texts]
        chosen = self._best(states, limits)
        for index, (text, state) in enumerate(zip(texts, states)):
            if text.draft_tokens is not None:
                chosen[index] = limits[index]
            elif chosen[index] == 0 and limits[index] and state.idle >= self._gap(state, len(texts)):
                chosen[index] = min(self.PROBE_K, limits[index])
        return chosen

    def observe(self, texts: list[Sequence], rounds: list[Round], timing: Timing) -> None:
        self.costs.observe(timing)
        for text, done in zip(texts, rounds):
            state = self._state(text)
            reach = max(depths(done.tree.parents[: done.tree.guesses]), default=-1) + 1
            if not reach:
                state.idle += 1
                continue
            state.rates.observe(reach, done.accepted)
            self._overall.observe(reach, done.accepted)
            state.gap = 8 if done.accepted == reach else min(2 * state.gap, self.LONGEST_GAP)
            state.idle = 0

    def forget(self, text: Sequence) -> None:
        self._texts.pop(text.number, None)

    def _state(self, text: Sequence) -> _TextState:
        state = self._texts.get(text.number)
        if state is None:
            # A new text starts from what texts before it have shown.
            rates = PositionRates(fade=0.9, prior=self._overall.at(0))
            state = self._texts[text.number] = _TextState(rates)
        return state

    def _best(self, states: list[_TextState], limits: list[int]) -> list[int]:
        """Add the guess that promises most, one by one, and remember the best batch seen on the way."""
        ks = [0] * len(states)
        reach = [1.0] * len(states)  # the chance that a text's next guess is reached at all
        tokens = float(len(states))
        plain = tokens / self.costs.round(len(states), 0)
        best, best_rate = list(ks), plain * self.MARGIN
        while True:
            gains = [
                reach[i] * state.rates.at(ks[i]) if ks[i] < limits[i] else -1.0 for i, state in enumerate(states)
            ]
            winner = max(range(len(gains)), key=gains.__getitem__)
            if gains[winner] < 0:
                return best
            ks[winner] += 1
            reach[winner] = gains[winner]
            tokens += gains[winner]
            rate = tokens / self.costs.round(len(states) + sum(ks), max(ks))
            if rate > best_rate:
                best, best_rate = list(ks), rate

    def _gap(self, state: _TextState, texts: int) -> float:
        """Rounds between probes: long enough that probing stays within its share, longer while probes fail."""
        plain = self.costs.round(texts, 0)
        extra = self.costs.round(texts + self.PROBE_K, self.PROBE_K) - plain
        return max(state.gap, extra / (self.PROBE_SHARE * plain))
