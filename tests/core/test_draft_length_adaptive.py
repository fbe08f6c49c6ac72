"""Rates and the small rules of the adaptive draft length. Its behaviour as a whole is in
test_draft_length_simulated.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.core.cost_model import CostCurve, CostModel, StepTiming
from paceline.core.draft_length import AdaptiveDraftLength, PositionRates
from paceline.core.draft_tree import DraftTree, chain, empty
from paceline.core.sequence import Sequence
from paceline.core.types import RowOutput, StepResult, VerifyResult
from tests.support.build import sequence

NO_OUTPUT = RowOutput(torch.empty(0, 0))
FLAT = {1: 10.0, 17: 11.0}  # width is nearly free
STEEP = {1: 10.0, 2: 20.0, 17: 170.0}  # every further token costs a pass


def seq(room: int = 1000, k: int | None = None, **params: Any) -> Sequence:
    return sequence([1], room, num_draft_tokens=k, **params)


def result_of(drafted: int, accepted: int) -> StepResult:
    tree = chain([0] * drafted) if drafted else empty()
    return StepResult(tree, VerifyResult(list(range(accepted)), 0), NO_OUTPUT, [0], accepted)


def play(policy: AdaptiveDraftLength, one: Sequence, accepted: int, steps: int, costs: dict[int, float]) -> list[int]:
    """Accept `accepted` draft tokens of every step; returns the ks that were planned."""
    curve, planned = CostCurve(costs), []
    for _ in range(steps):
        (k,) = policy.plan([one])
        planned.append(k)
        result = result_of(k, min(accepted, k))
        policy.observe([one], [result], StepTiming(0.0, curve.at(k + 1), k + 1, k, 1))
    return planned


def test_kinds_of_sequences_do_not_learn_from_each_other() -> None:
    policy = AdaptiveDraftLength(CostModel(CostCurve(FLAT)))
    hopeless, predicted = seq(), seq(prediction=[1, 2, 3])
    play(policy, hopeless, 0, 40, FLAT)
    assert policy.plan([seq()])[0] < policy.plan([predicted])[0]


def test_draft_tokens_that_fill_a_grain_are_free() -> None:
    costs = CostModel(CostCurve({1: 10.0, 8: 12.0, 16: 20.0, 24: 28.0}), grain=8)
    planned = AdaptiveDraftLength(costs).plan([seq() for _ in range(30)])
    assert sum(planned) in (2, 3), "two fill it; a third may be a probe"


def test_rates_by_position_are_conditional() -> None:
    rates = PositionRates(fade=1.0, prior=0.5, weight=0.0001)
    for accepted in (0, 1, 2, 2):
        rates.observe(2, accepted)
    assert rates.rates(2) == pytest.approx([0.75, 2 / 3], abs=0.01)
    assert rates.expected_tokens(2) == pytest.approx(1 + 0.75 + 0.5, abs=0.02)


def test_drafts_stop_where_none_is_accepted_and_grow_where_all_are() -> None:
    assert play(AdaptiveDraftLength(CostModel(CostCurve(FLAT))), seq(), 16, 40, FLAT)[-1] == 16
    planned = play(AdaptiveDraftLength(CostModel(CostCurve(STEEP))), seq(), 0, 200, STEEP)
    assert planned[-1] == 0
    assert sum(k > 0 for k in planned) <= 4


def test_the_policy_does_not_draft_past_the_end_and_honours_a_sequences_own_k() -> None:
    policy = AdaptiveDraftLength(CostModel(CostCurve(FLAT)))
    assert policy.plan([seq(room=1)]) == [0]
    own = seq(k=3)
    assert policy.plan([own]) == [3]
    assert policy.plan([seq(room=3, k=9)]) == [2]


@pytest.mark.slow
def test_a_plain_step_now_and_then_keeps_the_cost_of_plain_decoding_up_to_date() -> None:
    planned = play(AdaptiveDraftLength(CostModel(CostCurve(FLAT))), seq(room=100_000), 3, 1500, FLAT)
    assert 2 <= planned.count(0) <= 1500 // 64


def test_nothing_is_kept_of_a_forgotten_sequence() -> None:
    policy, one = AdaptiveDraftLength(CostModel(CostCurve(FLAT))), seq()
    play(policy, one, 1, 5, FLAT)
    policy.forget(one)
    policy.forget(one)
    assert not policy._states


def test_a_policy_that_rests_does_no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing pays, planning a step only checks whether a probe is due."""
    policy, sums = AdaptiveDraftLength(CostModel(CostCurve(STEEP))), []
    gains = policy._gains
    monkeypatch.setattr(policy, "_gains", lambda states, limits: sums.append(1) or gains(states, limits))
    play(policy, seq(), 0, 600, STEEP)
    assert len(sums) < 30  # a probe costs a pass, so one in 83 steps is allowed, and each needs two plans


def test_a_new_sequence_wakes_a_resting_policy() -> None:
    policy, old = AdaptiveDraftLength(CostModel(CostCurve(STEEP))), seq()
    play(policy, old, 0, 50, STEEP)
    fresh = seq(k=2)
    assert policy.plan([old, fresh]) == [0, 2]


def test_probe_nodes_are_part_of_the_cost() -> None:
    """A lookahead window of 8 nodes comes with every draft: what looked cheap by its draft tokens is not."""
    curve, one = {1: 10.0, 5: 10.5, 9: 40.0, 17: 80.0}, seq(room=100_000)
    policy, planned = AdaptiveDraftLength(CostModel(CostCurve(curve))), []
    for _ in range(100):
        (k,) = policy.plan([one])
        planned.append(k)
        tree = DraftTree([0] * (k + 8), [*range(-1, k - 1), *([-1] * 8)], probes=8) if k else empty()
        result = StepResult(tree, VerifyResult([0][: k > 0], 0), NO_OUTPUT, [0] * (1 + (k > 0)), int(k > 0))
        nodes = 1 + len(tree)
        policy.observe([one], [result], StepTiming(0.0, CostCurve(curve).at(nodes), nodes, k, 1))
    assert sum(k > 0 for k in planned) <= 4


def test_a_clock_that_does_not_advance_still_gives_possible_ks() -> None:
    policy, one = AdaptiveDraftLength(CostModel(CostCurve({1: 0.0}))), seq()
    for _ in range(5):
        (k,) = policy.plan([one])
        assert 0 <= k <= 16
        policy.observe([one], [result_of(k, k)], StepTiming(0.0, 0.0, k + 1, k, 1))


def test_a_step_of_several_in_a_row_that_a_later_plan_did_not_ask_for_is_no_pass_alone() -> None:
    """It was under way when the plan was made: draft and pass took its time together."""
    policy, seq = AdaptiveDraftLength(CostModel(CostCurve({1: 1.0, 9: 1.2})), 4), sequence([1, 2, 3], 1000)
    tree = chain([5, 6, 7, 8], confidence=[0.9] * 4)
    result = StepResult(tree, VerifyResult([0, 1], 2, [5, 6]), NO_OUTPUT, [5, 6, 2], 2)
    for planned in (4, 0):
        policy._state(seq).num_draft_tokens = planned
        policy.sent([seq], [tree])
        policy.observe([seq], [result], StepTiming(0.0, 4.0, 5, 4, 1, 1, looped=True))
        assert policy.costs.width(5) == pytest.approx(1.1)
