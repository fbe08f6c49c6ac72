"""How many tokens to draft. The rule of all rules: a policy never looks at the draft tokens it decides about."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.cost_model import CostCurve, CostModel, StepTiming
from paceline.core.draft_choice import DraftLimits
from paceline.core.draft_length import AdaptiveDraftLength, FixedDraftLength, within_room
from paceline.core.draft_tree import chain
from paceline.core.sequence import Sequence
from paceline.core.types import RowOutput, StepResult, VerifyResult
from paceline.errors import OptionError
from tests.support.build import sequence

P = {"A": Fraction(7, 10), "B": Fraction(3, 10)}
Q = {"A": Fraction(1, 2), "B": Fraction(1, 2)}


def seq(room: int = 10, k: int | None = None) -> Sequence:
    return sequence([1], room, num_draft_tokens=k)


def output_probability(token: str, verified: dict[str, bool]) -> Fraction:
    """The probability of `token` if a draft token g is put to the target only where verified[g]."""
    excess = {t: max(P[t] - Q[t], Fraction(0)) for t in P}
    total = sum(excess.values())
    probability = Fraction(0)
    for draft in Q:
        if not verified[draft]:
            probability += Q[draft] * P[token]
            continue
        accepts = min(Fraction(1), P[draft] / Q[draft])
        probability += Q[draft] * (accepts * (draft == token) + (1 - accepts) * excess[token] / total)
    return probability


def test_verifying_always_or_never_is_exact() -> None:
    for verified in ({"A": True, "B": True}, {"A": False, "B": False}):
        assert {token: output_probability(token, verified) for token in P} == P


def test_verifying_a_draft_token_only_if_it_is_liked_is_not_exact() -> None:
    """The counterexample: p = (.7, .3), q = (.5, .5), keep the draft only if it is A. The output is (.85, .15)."""
    liked = {"A": True, "B": False}
    assert [output_probability(token, liked) for token in "AB"] == [Fraction(85, 100), Fraction(15, 100)]


def test_a_fixed_draft_length_never_drafts_past_the_end() -> None:
    policy = FixedDraftLength(4)
    assert policy.plan([seq(10), seq(3), seq(1)]) == [4, 2, 0]


def test_a_sequences_own_k_goes_before_the_policys() -> None:
    own = seq(k=1)
    assert FixedDraftLength(4).plan([own, seq()]) == [1, 4]
    assert within_room(own, 7) == 1


def test_drafting_must_earn_what_catching_up_costs() -> None:
    """Eight more tokens cost nothing here, so drafting pays; but not where the drafter must first read a long
    prompt."""
    flat = CostModel(CostCurve({1: 1.0, 24: 1.0}))
    seqs = [sequence(list(range(200)), 100) for _ in range(4)]
    assert all(AdaptiveDraftLength(flat).plan(seqs))
    flat.catch_up = 1.0  # a token that the drafter reads costs as much as a pass
    drafting = [k for k in AdaptiveDraftLength(flat).plan(seqs) if k]
    assert len(drafting) <= 1, "at most a probe"


def test_what_a_drafter_has_not_read_is_counted_while_it_does_not_draft() -> None:
    costs = CostModel(CostCurve({1: 1.0, 2: 3.0, 24: 47.0}))  # drafting never pays
    policy, one = AdaptiveDraftLength(costs), sequence([1] * 10, 2000)
    unread: list[int] = []
    for _ in range(1200):
        [k] = policy.plan([one])
        unread += [policy._state(one).num_unread] if k else []
        tree = chain([5] * k)
        one.extend([7], 0)
        result = StepResult(tree, VerifyResult([], 7), RowOutput(torch.empty(0, 0)), [7])
        policy.observe([one], [result], StepTiming(0.0, 1.0 + 2.0 * k, 1 + k, k, 1))
    assert len(unread) > 1 and sum(unread) <= len(one.ids) and max(unread[1:]) > AdaptiveDraftLength.FEW_UNREAD


@pytest.mark.parametrize("k", [-1, 129, True, 2.5])
def test_impossible_k_is_refused(k: object) -> None:
    with pytest.raises(OptionError, match="0 to 128"):
        FixedDraftLength(k)  # type: ignore[arg-type]


def with_costs(step: float) -> AdaptiveDraftLength:
    costs = CostModel(verify=CostCurve({1: 1.0, 2: 1.0 + step, 9: 1.0 + 9 * step}))
    costs.draft.add(1, 0.05)
    return AdaptiveDraftLength(costs, max_draft_tokens=8)


@pytest.mark.slow
@given(
    step=st.floats(0.0, 0.5),
    outcomes=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8)), max_size=12),
    room=st.integers(2, 12),
)
def test_one_sequence_alone_is_planned_as_in_a_batch(step: float, outcomes: list[tuple[int, int]], room: int) -> None:
    policy, one = with_costs(step), seq(room)
    policy.plan([one])
    state = policy._state(one)
    for reach, accepted in outcomes:
        for rates in (state.rates, policy._rates_of(state.kind)):
            rates.observe(reach, min(reach, accepted))
    limits = [within_room(one, 8)]
    alone, together = policy._best_alone(state, limits[0]), policy._best_together([state], limits)
    assert alone.ks == together.ks and alone.rate == pytest.approx(together.rate)


def verified(policy: AdaptiveDraftLength, one: Sequence, accepted: int, k: int) -> None:
    result = VerifyResult(list(range(accepted)), 9)
    step = StepResult(chain(torch.arange(k)), result, RowOutput(torch.zeros(1, 1)), [1] * (accepted + 1))
    policy.observe([one], [step], StepTiming(0.05, 1.0 + 0.1 * k, k + 1, k, 1, int(k > 0)))


def test_a_choice_stands_while_no_draft_token_is_verified_and_no_longer() -> None:
    policy, one = with_costs(0.01), seq(1000)
    [first] = policy.plan([one])
    kept = policy._kept
    verified(policy, one, 0, 0)  # the drafter had nothing
    assert policy.plan([one]) == [first] and policy._kept is kept
    verified(policy, one, 0, first)
    assert policy._kept is None, "what was verified counts at once"
    for _ in range(40):
        policy.plan([one])
        verified(policy, one, 0, 0)
    assert policy._kept is not None and policy._kept.uses < 40, "costs are looked at again after a few steps"


@pytest.mark.parametrize(("num_seqs", "most"), [(1, 15), (2, 15), (3, 7), (4, 7), (5, 3), (8, 3), (12, 1), (32, 0)])
def test_a_batch_has_no_more_draft_tokens_than_are_rounded_as_plain_steps_are(num_seqs: int, most: int) -> None:
    assert DraftLimits(15, 32).of_each(num_seqs) == most
    policy = AdaptiveDraftLength(CostModel.known({1: 1.0, 64: 1.0}, {1: 1e-6}), 15, 32)
    seqs = [sequence([1, 2, 3], 100) for _ in range(num_seqs)]
    assert max(policy.plan(seqs)) <= most
    named = sequence([1, 2, 3], 100, num_draft_tokens=9)
    assert policy.plan([named, *seqs[1:]])[0] == 9, "a number that a client names is kept"
