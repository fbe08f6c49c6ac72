"""How many tokens to guess. The rule of all rules: a budget never looks at the guesses it decides about."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from paceline.core.budget import AdaptiveBudget, FixedBudget, within_room
from paceline.core.costs import CostCurve, Costs, Timing
from paceline.core.distribution import SamplingParams
from paceline.core.protocols import Output, Round, Verdict
from paceline.core.sequence import Sequence
from paceline.core.stopping import StopRules
from paceline.core.tree import chain
from paceline.errors import OptionError

P = {"A": Fraction(7, 10), "B": Fraction(3, 10)}
Q = {"A": Fraction(1, 2), "B": Fraction(1, 2)}


def text(room: int = 10) -> Sequence:
    return Sequence([1], SamplingParams(), StopRules(room))


def output_probability(token: str, verified: dict[str, bool]) -> Fraction:
    """The chance that `token` is written if a guess g is put to the target only where verified[g]."""
    excess = {t: max(P[t] - Q[t], Fraction(0)) for t in P}
    total = sum(excess.values())
    chance = Fraction(0)
    for guess in Q:
        if not verified[guess]:
            chance += Q[guess] * P[token]
            continue
        stands = min(Fraction(1), P[guess] / Q[guess])
        chance += Q[guess] * (stands * (guess == token) + (1 - stands) * excess[token] / total)
    return chance


def test_verifying_always_or_never_is_exact() -> None:
    for verified in ({"A": True, "B": True}, {"A": False, "B": False}):
        assert {token: output_probability(token, verified) for token in P} == P


def test_keeping_a_guess_only_if_it_is_liked_is_not_exact() -> None:
    """The counterexample: p = (.7, .3), q = (.5, .5), keep the draft only if it is A. The output is (.85, .15)."""
    liked = {"A": True, "B": False}
    assert [output_probability(token, liked) for token in "AB"] == [Fraction(85, 100), Fraction(15, 100)]


def test_a_fixed_budget_never_guesses_past_the_end() -> None:
    budget = FixedBudget(4)
    assert budget.plan([text(10), text(3), text(1)]) == [4, 2, 0]


def test_a_texts_own_k_goes_before_the_budgets() -> None:
    own = text()
    own.draft_tokens = 1
    assert FixedBudget(4).plan([own, text()]) == [1, 4]
    assert within_room(own, 7) == 1


def test_guessing_must_earn_what_catching_up_costs() -> None:
    """Eight more tokens cost nothing here, so guessing pays; but not where the draft must first read a long text."""
    flat = Costs(CostCurve({1: 1.0, 24: 1.0}))
    texts = [Sequence(list(range(200)), SamplingParams(), StopRules(100)) for _ in range(4)]
    assert all(AdaptiveBudget(flat).plan(texts))
    flat.late = 1.0  # a token of a text is as dear as a pass
    asked = [k for k in AdaptiveBudget(flat).plan(texts) if k]
    assert len(asked) <= 1, "at most a probe"


def test_what_a_draft_has_missed_is_counted_while_nothing_is_asked_of_it() -> None:
    costs = Costs(CostCurve({1: 1.0, 2: 3.0, 24: 47.0}))  # guessing never pays
    budget, one = AdaptiveBudget(costs), Sequence([1] * 10, SamplingParams(), StopRules(2000))
    asked = []
    for _ in range(1200):
        [k] = budget.plan([one])
        asked += [budget._state(one).behind] if k else []
        tree = chain([5] * k)
        one.extend([7], 0)
        done = Round(tree, Verdict([], 7), Output(torch.empty(0, 0)), [7])
        budget.observe([one], [done], Timing(0.0, 1.0 + 2.0 * k, 1 + k, k, 1))
    assert len(asked) > 1 and sum(asked) <= len(one.ids) and max(asked[1:]) > AdaptiveBudget.LITTLE


@pytest.mark.parametrize("k", [-1, 129, True, 2.5])
def test_impossible_k_is_refused(k: object) -> None:
    with pytest.raises(OptionError, match="0 to 128"):
        FixedBudget(k)  # type: ignore[arg-type]
