"""Rates and the small rules of the adaptive budget. Its behaviour as a whole is in test_budget_simulated.py."""

from __future__ import annotations

import pytest
import torch

from paceline.core.cost_model import CostCurve, CostModel, StepTiming
from paceline.core.draft_length import AdaptiveDraftLength, PositionRates
from paceline.core.draft_tree import DraftTree, chain, empty
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.core.stopping import StopRules
from paceline.core.types import RowOutput, StepResult, VerifyResult

NOTHING_SAID = RowOutput(torch.empty(0, 0))
FLAT = {1: 10.0, 17: 11.0}  # width is nearly free
STEEP = {1: 10.0, 2: 20.0, 17: 170.0}  # every further token costs a pass


def seq(room: int = 1000, k: int | None = None) -> Sequence:
    made = Sequence([1], SamplingParams(), StopRules(room))
    made.num_draft_tokens = k
    return made


def judged(offered: int, stood: int) -> StepResult:
    return StepResult(chain([0] * offered) if offered else empty(), VerifyResult(list(range(stood)), 0), NOTHING_SAID, [0], stood)


def play(budget: AdaptiveDraftLength, one: Sequence, stood: int, results: int, costs: dict[int, float]) -> list[int]:
    """Let `stood` guesses of every round stand; the ks that were planned."""
    curve, planned = CostCurve(costs), []
    for _ in range(results):
        (k,) = budget.plan([one])
        planned.append(k)
        result = judged(k, min(stood, k))
        budget.observe([one], [result], StepTiming(0.0, curve.at(k + 1), k + 1, k, 1))
    return planned


def test_kinds_of_texts_do_not_learn_from_each_other() -> None:
    budget = AdaptiveDraftLength(CostModel(CostCurve(FLAT)))
    hopeless, predicted = seq(), seq()
    predicted.prediction = [1, 2, 3]
    play(budget, hopeless, 0, 40, FLAT)
    assert budget.plan([seq()])[0] < budget.plan([predicted])[0]


def test_guesses_that_fill_a_grain_are_free() -> None:
    costs = CostModel(CostCurve({1: 10.0, 8: 12.0, 16: 20.0, 24: 28.0}), grain=8)
    planned = AdaptiveDraftLength(costs).plan([seq() for _ in range(30)])
    assert sum(planned) in (2, 3), "two fill it; a third may be a probe"


def test_rates_by_position_are_conditional() -> None:
    rates = PositionRates(fade=1.0, prior=0.5, weight=0.0001)
    for stood in (0, 1, 2, 2):
        rates.observe(2, stood)
    assert rates.ladder(2) == pytest.approx([0.75, 2 / 3], abs=0.01)
    assert rates.expected_tokens(2) == pytest.approx(1 + 0.75 + 0.5, abs=0.02)


def test_guesses_stop_where_they_never_stand_and_grow_where_they_always_do() -> None:
    assert play(AdaptiveDraftLength(CostModel(CostCurve(FLAT))), seq(), 16, 40, FLAT)[-1] == 16
    planned = play(AdaptiveDraftLength(CostModel(CostCurve(STEEP))), seq(), 0, 200, STEEP)
    assert planned[-1] == 0
    assert sum(k > 0 for k in planned) <= 4


def test_the_budget_does_not_guess_past_the_end_and_honours_a_texts_own_k() -> None:
    budget = AdaptiveDraftLength(CostModel(CostCurve(FLAT)))
    assert budget.plan([seq(room=1)]) == [0]
    own = seq(k=3)
    assert budget.plan([own]) == [3]
    assert budget.plan([seq(room=3, k=9)]) == [2]


def test_a_plain_round_now_and_then_keeps_the_price_of_plain_decoding_known() -> None:
    planned = play(AdaptiveDraftLength(CostModel(CostCurve(FLAT))), seq(room=100_000), 3, 1500, FLAT)
    assert 2 <= planned.count(0) <= 1500 // 64


def test_a_forgotten_text_leaves_nothing_behind() -> None:
    budget, one = AdaptiveDraftLength(CostModel(CostCurve(FLAT))), seq()
    play(budget, one, 1, 5, FLAT)
    budget.forget(one)
    budget.forget(one)
    assert not budget._texts


def test_a_budget_that_rests_does_no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing pays, a round is planned by asking whether a probe is due, and by nothing else."""
    budget, sums = AdaptiveDraftLength(CostModel(CostCurve(STEEP))), []
    gains = budget._gains
    monkeypatch.setattr(budget, "_gains", lambda states, limits: sums.append(1) or gains(states, limits))
    play(budget, seq(), 0, 600, STEEP)
    assert len(sums) < 30  # a probe costs a pass, so one in 83 rounds is allowed, and each needs two plans


def test_a_new_text_wakes_a_resting_budget() -> None:
    budget, old = AdaptiveDraftLength(CostModel(CostCurve(STEEP))), seq()
    play(budget, old, 0, 50, STEEP)
    fresh = seq(k=2)
    assert budget.plan([old, fresh]) == [0, 2]


def test_nodes_that_ride_along_are_part_of_the_price() -> None:
    """A lookahead window of 8 nodes rides along with every guess: what looked cheap by its guesses is not."""
    curve, one = {1: 10.0, 5: 10.5, 9: 40.0, 17: 80.0}, seq(room=100_000)
    budget, planned = AdaptiveDraftLength(CostModel(CostCurve(curve))), []
    for _ in range(100):
        (k,) = budget.plan([one])
        planned.append(k)
        tree = DraftTree([0] * (k + 8), [*range(-1, k - 1), *([-1] * 8)], probes=8) if k else empty()
        result = StepResult(tree, VerifyResult([0][: k > 0], 0), NOTHING_SAID, [0] * (1 + (k > 0)), int(k > 0))
        nodes = 1 + len(tree)
        budget.observe([one], [result], StepTiming(0.0, CostCurve(curve).at(nodes), nodes, k, 1))
    assert sum(k > 0 for k in planned) <= 4


def test_a_clock_that_stands_still_breaks_nothing() -> None:
    budget, one = AdaptiveDraftLength(CostModel(CostCurve({1: 0.0}))), seq()
    for _ in range(5):
        (k,) = budget.plan([one])
        budget.observe([one], [judged(k, k)], StepTiming(0.0, 0.0, k + 1, k, 1))
