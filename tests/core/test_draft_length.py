"""How many tokens to guess. The rule of all rules: a budget never looks at the guesses it decides about."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from paceline.core.cost_model import CostCurve, CostModel, StepTiming
from paceline.core.draft_length import AdaptiveDraftLength, FixedDraftLength, within_room
from paceline.core.draft_tree import chain
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.core.stopping import StopRules
from paceline.core.types import RowOutput, StepResult, VerifyResult
from paceline.errors import OptionError

P = {"A": Fraction(7, 10), "B": Fraction(3, 10)}
Q = {"A": Fraction(1, 2), "B": Fraction(1, 2)}


def seq(room: int = 10) -> Sequence:
    return Sequence([1], SamplingParams(), StopRules(room))


def output_probability(token: str, verified: dict[str, bool]) -> Fraction:
    """The chance that `token` is written if a guess g is put to the target only where verified[g]."""
    excess = {t: max(P[t] - Q[t], Fraction(0)) for t in P}
    total = sum(excess.values())
    uniforms = Fraction(0)
    for guess in Q:
        if not verified[guess]:
            uniforms += Q[guess] * P[token]
            continue
        stands = min(Fraction(1), P[guess] / Q[guess])
        uniforms += Q[guess] * (stands * (guess == token) + (1 - stands) * excess[token] / total)
    return uniforms


def test_verifying_always_or_never_is_exact() -> None:
    for verified in ({"A": True, "B": True}, {"A": False, "B": False}):
        assert {token: output_probability(token, verified) for token in P} == P


def test_keeping_a_guess_only_if_it_is_liked_is_not_exact() -> None:
    """The counterexample: p = (.7, .3), q = (.5, .5), keep the draft only if it is A. The output is (.85, .15)."""
    liked = {"A": True, "B": False}
    assert [output_probability(token, liked) for token in "AB"] == [Fraction(85, 100), Fraction(15, 100)]


def test_a_fixed_budget_never_guesses_past_the_end() -> None:
    budget = FixedDraftLength(4)
    assert budget.plan([seq(10), seq(3), seq(1)]) == [4, 2, 0]


def test_a_texts_own_k_goes_before_the_budgets() -> None:
    own = seq()
    own.num_draft_tokens = 1
    assert FixedDraftLength(4).plan([own, seq()]) == [1, 4]
    assert within_room(own, 7) == 1


def test_guessing_must_earn_what_catching_up_costs() -> None:
    """Eight more tokens cost nothing here, so guessing pays; but not where the draft must first read a long text."""
    flat = CostModel(CostCurve({1: 1.0, 24: 1.0}))
    seqs = [Sequence(list(range(200)), SamplingParams(), StopRules(100)) for _ in range(4)]
    assert all(AdaptiveDraftLength(flat).plan(seqs))
    flat.late = 1.0  # a token of a text is as dear as a pass
    asked = [k for k in AdaptiveDraftLength(flat).plan(seqs) if k]
    assert len(asked) <= 1, "at most a probe"


def test_what_a_draft_has_missed_is_counted_while_nothing_is_asked_of_it() -> None:
    costs = CostModel(CostCurve({1: 1.0, 2: 3.0, 24: 47.0}))  # guessing never pays
    budget, one = AdaptiveDraftLength(costs), Sequence([1] * 10, SamplingParams(), StopRules(2000))
    asked = []
    for _ in range(1200):
        [k] = budget.plan([one])
        asked += [budget._state(one).behind] if k else []
        tree = chain([5] * k)
        one.extend([7], 0)
        result = StepResult(tree, VerifyResult([], 7), RowOutput(torch.empty(0, 0)), [7])
        budget.observe([one], [result], StepTiming(0.0, 1.0 + 2.0 * k, 1 + k, k, 1))
    assert len(asked) > 1 and sum(asked) <= len(one.ids) and max(asked[1:]) > AdaptiveDraftLength.LITTLE


@pytest.mark.parametrize("k", [-1, 129, True, 2.5])
def test_impossible_k_is_refused(k: object) -> None:
    with pytest.raises(OptionError, match="0 to 128"):
        FixedDraftLength(k)  # type: ignore[arg-type]
