"""Several drafters for one sequence, and every step the one that earns the most tokens per second.

A look into the sequence's own past (suffix) is free and sometimes wins many tokens; a head or a draft model wins some
nearly always and takes time for it. So before a step the lookup says how many of its draft tokens it expects to stand, the
others have shown what theirs bring, and both are divided by the seconds their steps take.

The choice is made from the past alone: what is written, what was accepted, how long it took. No drawn draft token is ever
looked at before choosing, so whichever drafter is chosen, the sequence stays exactly the target's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Drafter
from paceline.core.sequence import Sequence
from paceline.core.types import Capability, RowOutput, StepResult
from paceline.drafting.suffix_automaton import Forecast
from paceline.errors import OptionError

FADE = 0.9  # weight of the past against one more step
HOPE = 2.0  # tokens a drafter is credited with a step before it was tried
RETRY = 32  # steps after which a drafter that lost out is tried again: sequences change
LOOKUP = "lookup"


class Forecaster(Drafter, Protocol):
    """A drafter that can tell, without drawing anything, how many of its draft tokens it expects to stand."""

    def forecast(self, seq: Sequence, budget: int) -> Forecast: ...


@dataclass(slots=True)
class Mean:
    """A mean in which old values fade. The first value replaces the assumption it started with."""

    value: float
    fresh: bool = True

    def add(self, sample: float) -> None:
        self.value = sample if self.fresh else FADE * self.value + (1 - FADE) * sample
        self.fresh = False


@dataclass(slots=True)
class Trust:
    """What the lookup's expectations have been worth: accepted to expected draft tokens, lately. Unused, it returns to 1."""

    accepted: float = 0.0
    expected: float = 0.0

    def add(self, accepted: float, expected: float) -> None:
        self.accepted = FADE * self.accepted + accepted
        self.expected = FADE * self.expected + expected

    @property
    def value(self) -> float:
        return (1 + self.accepted) / (1 + self.expected)


@dataclass(slots=True)
class _Account:
    """How the drafters have done for one sequence."""

    earned: dict[str, Mean]  # accepted draft tokens a step
    trust: Trust = field(default_factory=Trust)
    waited: dict[str, int] = field(default_factory=dict)  # steps since each was last chosen
    chosen: str = LOOKUP
    expected: float = 0.0


class AutoDrafter(Drafter):
    """Chooses a drafter a sequence and step.

    lookup  draft tokens from what is written; `others` draft token with a model or a head, by name
    """

    def __init__(
        self, lookup: Forecaster, others: Mapping[str, Drafter], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        if LOOKUP in others:
            raise OptionError(f"a drafter beside the lookup cannot be called {LOOKUP!r}")
        self.lookup, self.others = lookup, dict(others)
        everyone = (lookup, *self.others.values())
        self.needs: frozenset[Capability] = frozenset().union(*(drafter.needs for drafter in everyone))
        self._clock = clock
        self._accounts: dict[int, _Account] = {}
        self._draft_seconds = {name: Mean(0.0) for name in (LOOKUP, *self.others)}
        self._pass_seconds = {name: Mean(0.0) for name in (LOOKUP, *self.others)}
        self._proposed_at = 0.0

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        self._account(seq)
        for drafter in (self.lookup, *self.others.values()):
            drafter.begin(seq, prompt)

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        started = self._clock()
        forecasts = [self.lookup.forecast(seq, budget) for seq, budget in zip(seqs, num_draft_tokens)]
        trees = [forecast.tree for forecast in forecasts]
        self._draft_seconds[LOOKUP].add(self._clock() - started)
        for seq, budget, forecast in zip(seqs, num_draft_tokens, forecasts):
            self._choose(self._account(seq), budget, forecast.expected)
        for name in self.others:
            self._ask(name, seqs, num_draft_tokens, trees)
        self._proposed_at = self._clock()
        return trees

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        seconds = self._clock() - self._proposed_at
        for name in {self._account(seq).chosen for seq, result in zip(seqs, results) if result.tree.num_draft_tokens}:
            self._pass_seconds[name].add(seconds)
        for seq, result in zip(seqs, results):
            self._learn(self._account(seq), result)
        for drafter in (self.lookup, *self.others.values()):
            drafter.observe(seqs, results)

    def end(self, seq: Sequence) -> None:
        self._accounts.pop(seq.seq_id, None)
        for drafter in (self.lookup, *self.others.values()):
            drafter.end(seq)

    def _account(self, seq: Sequence) -> _Account:
        account = self._accounts.get(seq.seq_id)
        if account is None:
            # What other sequences have earned is not looked at: it would show in this one.
            account = self._accounts[seq.seq_id] = _Account({name: Mean(HOPE) for name in self.others})
        return account

    def _choose(self, account: _Account, budget: int, expected: float) -> None:
        """Name the drafter of the next step, from what is written and what was earned before."""
        rates = {LOOKUP: (1 + account.trust.value * expected) / self._seconds(LOOKUP)}
        for name, earned in account.earned.items():
            rates[name] = (1 + min(earned.value, budget)) / self._seconds(name)
        best = max(rates, key=rates.__getitem__)
        for name in self.others:
            account.waited[name] = 0 if name == best else account.waited.get(name, 0) + (budget > 0)
            if account.waited[name] >= RETRY and best == LOOKUP:
                best, account.waited[name] = name, 0
        account.chosen, account.expected = best, expected

    def _seconds(self, name: str) -> float:
        """What a step of this drafter takes; one that was never timed is taken to cost as much as the lookup's."""
        passed = self._pass_seconds[name]
        if passed.fresh:
            passed = self._pass_seconds[LOOKUP]
        return self._draft_seconds[name].value + passed.value or 1.0

    def _ask(self, name: str, seqs: list[Sequence], num_draft_tokens: list[int], trees: list[DraftTree]) -> None:
        """Let one drafter draft token for the sequences that chose it. It is told of all, so that it stays in step with them."""
        chosen = [self._account(seq).chosen == name for seq in seqs]
        started = self._clock()
        from_draft = self.others[name].propose(seqs, [budget if mine else 0 for budget, mine in zip(num_draft_tokens, chosen)])
        if any(mine and budget for mine, budget in zip(chosen, num_draft_tokens)):
            self._draft_seconds[name].add(self._clock() - started)
        for place, mine in enumerate(chosen):
            if mine:
                trees[place] = from_draft[place]

    def _learn(self, account: _Account, result: StepResult) -> None:
        if account.chosen == LOOKUP:
            account.trust.add(result.accepted, account.expected)
            return
        account.trust.add(0.0, 0.0)
        if result.tree.num_draft_tokens:
            account.earned[account.chosen].add(result.accepted)
