"""Predicted speed-ups against the textbook formula and against counted tokens."""

from __future__ import annotations

import pytest

from paceline.bench.measure import BatchRun, OutputLength, StepRecord
from paceline.bench.speedup_model import DraftBehaviour, PlainCost, behaviour_of, conditional_rates, observed_curve
from paceline.core.cost_model import CostCurve, StepTiming
from paceline.core.stats import SpecStats
from paceline.plan.predict import speedup
from tests.support.bench_toys import CONTEXT, measured_engine, toy_candidates

FLAT = CostCurve({1: 1.0, 17: 1.0})
FREE = CostCurve({0: 0.0})


def behaviour(rates: list[float], draft_seconds: float = 0.0, **changes: float) -> DraftBehaviour:
    values = {"draft_share": 1.0, "fill": 1.0, "depth": 1.0, "start_seconds": 0.0} | changes
    return DraftBehaviour(len(rates), rates, draft_seconds=draft_seconds, **values)


def test_with_a_constant_rate_the_prediction_is_the_textbook_formula() -> None:
    """a = .8, k = 4, c = .1: 3.3616 tokens per step and 2.40x."""
    drafting = behaviour([0.8] * 4, draft_seconds=0.4)
    assert drafting.tokens_per_step(4) == pytest.approx(3.3616)
    predicted = PlainCost(1000.0, 0.0, FLAT).speedup(drafting, 4, CostCurve({0: 0.0, 4: 0.4}))
    assert predicted == pytest.approx(speedup(0.8, 4, 0.1)) == pytest.approx(2.4011, abs=1e-3)


def test_steps_without_a_draft_and_branches_are_weighed() -> None:
    assert behaviour([1.0] * 4, draft_share=0.5).tokens_per_step(4) == pytest.approx(3.0)
    assert behaviour([1.0] * 4, fill=0.5).tokens_per_step(4) == pytest.approx(3.0)
    assert behaviour([0.5, 0.5], depth=0.25).tokens_per_step(4) == pytest.approx(1.5)
    assert behaviour([]).tokens_per_step(4) == 1.0


def test_rates_are_of_the_steps_that_came_so_far() -> None:
    steps = [StepRecord(0, 2, 2, 0), StepRecord(1, 2, 2, 1), StepRecord(3, 2, 2, 2), StepRecord(6, 2, 2, 2)]
    assert conditional_rates(steps) == [0.75, pytest.approx(2 / 3)]


@pytest.mark.slow
def test_tokens_per_step_predicted_from_one_run_are_those_of_another() -> None:
    """Behaviour measured at k = 6 predicts tokens per step at k = 2 within 15%."""
    candidates, prompts = toy_candidates(), [CONTEXT, [1, 2, 3, 4], [3, 3, 0, 1], [2, 4, 1, 0]]
    engines = {k: measured_engine(candidates, "draft_model", k) for k in (2, 6)}
    runs = {
        k: [engine.run([prompt], OutputLength(300), 1.0, seed=5) for prompt in prompts] for k, engine in engines.items()
    }
    predicted = behaviour_of(runs[6], 6, FLAT).tokens_per_step(2)
    counted = sum(run.stats.new_tokens for run in runs[2]) / sum(run.stats.steps for run in runs[2])
    assert predicted == pytest.approx(counted, rel=0.15)


def test_a_cost_curve_is_corrected_by_real_passes() -> None:
    runs = [measured_engine(toy_candidates(), "none").run([CONTEXT], OutputLength(30))]
    corrected = observed_curve(CostCurve({1: 100.0, 5: 200.0}), runs)
    assert corrected.at(1) < 1.0
    assert corrected.at(5) == pytest.approx(2 * corrected.at(1))
    assert observed_curve(FLAT, []) is FLAT


def test_drafting_that_the_host_does_not_see_is_what_a_step_takes_beyond_a_pass() -> None:
    timings = [StepTiming(0.1, 5.0, 4, 3, 1), StepTiming(0.1, 3.0, 4, 3, 1), StepTiming(0.1, 3.0, 4, 3, 1)]
    passes = CostCurve({1: 1.0, 4: 1.0})
    seen = behaviour_of([BatchRun([], SpecStats(), timings, [])], 3, passes)
    unseen = behaviour_of([BatchRun([], SpecStats(), timings, [], drafts_unseen=True)], 3, passes)
    assert (seen.draft_seconds, seen.start_seconds) == (pytest.approx(0.1), pytest.approx(0.0))
    assert (unseen.draft_seconds, unseen.start_seconds) == (pytest.approx(2.1), pytest.approx(2.0))


def test_what_drafting_costs_once_sets_the_shortest_output_that_pays() -> None:
    plain = PlainCost(100.0, 0.0, FLAT)
    two_per_step = behaviour([1.0], start_seconds=10.0)  # half a pass saved per token
    assert plain.shortest_output(two_per_step, 1, FREE) == 21
    assert plain.shortest_output(behaviour([1.0]), 1, FREE) == 0
    assert plain.shortest_output(behaviour([0.0], start_seconds=10.0), 1, FREE) == 0
