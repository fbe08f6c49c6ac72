"""Several drafters for one text, and every round the one that earns the most tokens per second.

A look into the text's own past (suffix) is free and sometimes wins many tokens; a head or a draft model wins some
nearly always and takes time for it. So before a round the lookup says how many of its guesses it expects to stand, the
others have shown what theirs bring, and both are divided by the seconds their rounds take.

The choice is made from the past alone: what is written, what was accepted, how long it took. No drawn guess is ever
looked at before choosing, so whichever drafter is chosen, the text stays exactly the target's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.protocols import Ability, Drafter, Output, Round
from paceline.core.sequence import Sequence
from paceline.core.tree import DraftTree
from paceline.drafting.automaton import Forecast
from paceline.errors import OptionError

FADE = 0.9  # weight of the past against one more round
HOPE = 2.0  # tokens a drafter is credited with a round before it was tried
RETRY = 32  # rounds after which a drafter that lost out is tried again: texts change
LOOKUP = "lookup"


class Forecaster(Drafter, Protocol):
    """A drafter that can tell, without drawing anything, how many of its guesses it expects to stand."""

    def forecast(self, text: Sequence, budget: int) -> Forecast: ...


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
    """What the lookup's expectations have been worth: accepted to expected guesses, lately. Unused, it returns to 1."""

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
    """How the drafters have done for one text."""

    earned: dict[str, Mean]  # accepted guesses a round
    trust: Trust = field(default_factory=Trust)
    waited: dict[str, int] = field(default_factory=dict)  # rounds since each was last chosen
    chosen: str = LOOKUP
    expected: float = 0.0


class Combined:
    """Chooses a drafter a text and round.

    lookup  guesses from what is written; `others` guess with a model or a head, by name
    """

    def __init__(
        self, lookup: Forecaster, others: Mapping[str, Drafter], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        if LOOKUP in others:
            raise OptionError(f"a drafter beside the lookup cannot be called {LOOKUP!r}")
        self.lookup, self.others = lookup, dict(others)
        everyone = (lookup, *self.others.values())
        self.needs: frozenset[Ability] = frozenset().union(*(drafter.needs for drafter in everyone))
        self._clock = clock
        self._accounts: dict[int, _Account] = {}
        self._draft_seconds = {name: Mean(0.0) for name in (LOOKUP, *self.others)}
        self._pass_seconds = {name: Mean(0.0) for name in (LOOKUP, *self.others)}
        self._proposed_at = 0.0

    def begin(self, text: Sequence, prompt: Output | None) -> None:
        self._account(text)
        for drafter in (self.lookup, *self.others.values()):
            drafter.begin(text, prompt)

    def propose(self, texts: list[Sequence], budgets: list[int]) -> list[DraftTree]:
        started = self._clock()
        forecasts = [self.lookup.forecast(text, budget) for text, budget in zip(texts, budgets)]
        trees = [forecast.tree for forecast in forecasts]
        self._draft_seconds[LOOKUP].add(self._clock() - started)
        for text, budget, forecast in zip(texts, budgets, forecasts):
            self._choose(self._account(text), budget, forecast.expected)
        for name in self.others:
            self._ask(name, texts, budgets, trees)
        self._proposed_at = self._clock()
        return trees

    def observe(self, texts: list[Sequence], rounds: list[Round]) -> None:
        seconds = self._clock() - self._proposed_at
        for name in {self._account(text).chosen for text, done in zip(texts, rounds) if done.tree.guesses}:
            self._pass_seconds[name].add(seconds)
        for text, done in zip(texts, rounds):
            self._learn(self._account(text), done)
        for drafter in (self.lookup, *self.others.values()):
            drafter.observe(texts, rounds)

    def end(self, text: Sequence) -> None:
        self._accounts.pop(text.number, None)
        for drafter in (self.lookup, *self.others.values()):
            drafter.end(text)

    def _account(self, text: Sequence) -> _Account:
        account = self._accounts.get(text.number)
        if account is None:
            # What other texts have earned is not looked at: it would show in this one.
            account = self._accounts[text.number] = _Account({name: Mean(HOPE) for name in self.others})
        return account

    def _choose(self, account: _Account, budget: int, expected: float) -> None:
        """Name the drafter of the next round, from what is written and what was earned before."""
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
        """What a round of this drafter takes; one that was never timed is taken to cost as much as the lookup's."""
        passed = self._pass_seconds[name]
        if passed.fresh:
            passed = self._pass_seconds[LOOKUP]
        return self._draft_seconds[name].value + passed.value or 1.0

    def _ask(self, name: str, texts: list[Sequence], budgets: list[int], trees: list[DraftTree]) -> None:
        """Let one drafter guess for the texts that chose it. It is told of all, so that it stays in step with them."""
        chosen = [self._account(text).chosen == name for text in texts]
        started = self._clock()
        guessed = self.others[name].propose(texts, [budget if mine else 0 for budget, mine in zip(budgets, chosen)])
        if any(mine and budget for mine, budget in zip(chosen, budgets)):
            self._draft_seconds[name].add(self._clock() - started)
        for place, mine in enumerate(chosen):
            if mine:
                trees[place] = guessed[place]

    def _learn(self, account: _Account, done: Round) -> None:
        if account.chosen == LOOKUP:
            account.trust.add(done.accepted, account.expected)
            return
        account.trust.add(0.0, 0.0)
        if done.tree.guesses:
            account.earned[account.chosen].add(done.accepted)
