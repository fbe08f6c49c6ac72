"""Advice that follows from the figures."""

from __future__ import annotations

import pytest

from paceline.bench.candidates import DecodeSetting
from paceline.bench.measure import BatchRun, OutputLength
from paceline.bench.speedup_model import PlainCost
from paceline.bench.tune import (
    PLAIN,
    ConfirmedSpeedup,
    MethodMeasurements,
    SpeedupEstimate,
    TuneAdvice,
    TunePlan,
    advise,
    best_of_each_method,
    estimate,
    promising,
    tune,
)
from paceline.core.cost_model import CostCurve
from paceline.core.stats import SpecStats
from tests.bench.test_speedup_model import FLAT, behaviour
from tests.support.bench_toys import CONTEXT, toy_candidates


def runs_of(tokens: int, seconds: float) -> list[BatchRun]:
    return [BatchRun([], SpecStats(new_tokens=tokens, seconds=seconds), [], [])] * 2


def test_settings_far_behind_plain_decoding_are_dropped() -> None:
    good, near, far = DecodeSetting("good", 3), DecodeSetting("near", 3), DecodeSetting("far", 8)
    runs = {PLAIN: runs_of(64, 2.0), good: runs_of(64, 1.5), near: runs_of(40, 2.0), far: runs_of(64, 3.5)}
    assert promising(runs) == [PLAIN, good, near]


def test_estimates_cover_every_k_and_the_best_of_each_method_is_run() -> None:
    methods = {
        "good": MethodMeasurements({3: behaviour([0.9] * 3)}),
        "bad": MethodMeasurements({3: behaviour([0.1] * 3)}),
    }
    estimates = estimate(methods, PlainCost(100.0, 0.0, CostCurve({1: 1.0, 9: 2.0, 17: 4.0})))
    assert len(estimates) == 32
    assert estimates == sorted(estimates, key=lambda item: -item.speedup)
    assert [item.method for item in best_of_each_method(estimates)] == ["good", "bad"]


def advice_for(measured: float, start_seconds: float = 0.0, tokens_per_step: float = 2.9) -> TuneAdvice:
    methods = {"ngram": MethodMeasurements({3: behaviour([0.8] * 3, start_seconds=start_seconds)})}
    estimates = [SpeedupEstimate("ngram", 3, 2.9, 0.8 if measured < 1 else 1.6)]
    confirmed = [ConfirmedSpeedup("ngram", 3, estimates[0].speedup, measured, tokens_per_step)]
    return advise(estimates, confirmed, methods, PlainCost(100.0, 0.0, FLAT))


def test_advice_against_speculation_states_prediction_and_measurement() -> None:
    advice = advice_for(0.82)
    assert advice.sentence.startswith("Do not speculate on this machine: predicted 0.80x")
    assert "0.82x" in advice.sentence
    assert advice.method == "none"


def test_a_speed_up_above_the_tokens_per_step_is_noise_and_no_advice() -> None:
    advice = advice_for(1.48, tokens_per_step=1.0)
    assert (advice.method, advice.measured) == ("none", None)
    assert "Do not speculate" in advice.sentence
    assert "ngram k=3 is noise (measured 1.48x, but 1.00 tokens a step allow no more than 1.00x)" in advice.sentence


def test_advice_names_the_method_and_the_outputs_it_pays_for() -> None:
    advice = advice_for(1.55, start_seconds=30.0)
    assert "Use method ngram with k=3: measured 1.55x" in advice.sentence
    assert "outputs under 46 tokens: not worth it" in advice.sentence
    assert advice.method == "ngram"
    assert "not worth it" not in advice_for(1.55).sentence


def test_without_any_method_the_advice_is_plain_decoding() -> None:
    advice = advise([], [], {}, PlainCost(10.0, 0.0, FLAT))
    assert (advice.method, advice.num_draft_tokens) == ("none", 0)


@pytest.mark.slow
def test_tuning_runs_from_end_to_end() -> None:
    result = tune(toy_candidates(), TunePlan([CONTEXT, [1, 2, 3]], OutputLength(16), repeats=1))
    assert {item.method for item in result.estimates} == {"draft_model", "ngram"}
    assert [item.num_draft_tokens for item in result.confirmed][-1] == "auto"
    assert result.advice.sentence.endswith(".")
    assert result.verify.at(1) > 0
