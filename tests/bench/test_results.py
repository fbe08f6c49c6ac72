"""What becomes of measurements: counts, speed-ups, the lossless check, the record and its schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from torch import Tensor

from paceline.bench.measure import BatchRun
from paceline.bench.outcome import Outcome
from paceline.bench.report import cells, headline
from paceline.bench.results import LosslessCheck, LosslessResult, Measurements, setting_record
from paceline.bench.sampling_test import SampleLimit
from paceline.bench.sweep import SettingRun, grid
from paceline.core.draft_tree import DraftTree
from paceline.core.stats import SpecStats
from paceline.core.types import VerifyResult
from paceline.core.verify import RULES, AcceptanceRule, verify_tokens
from tests.support.bench_toys import PASSES, VOCAB_SIZE, measured, toy_candidates, toy_plan, toy_run
from tests.support.wrong_rules import resample_from_target, wrong_rule

SCHEMA = Path(__file__).parents[2] / "docs" / "results.schema.json"


def setting_of(run: dict[str, Any], method: str) -> dict[str, Any]:
    (setting,) = [setting for setting in run["settings"] if setting["method"] == method]
    return dict(setting)


def validate(run: dict[str, Any]) -> None:
    jsonschema.validate({"format": "paceline results", "runs": [run]}, json.loads(SCHEMA.read_text()))


@pytest.mark.slow
def test_a_run_fits_the_schema() -> None:
    run = toy_run(toy_candidates(), toy_plan(settings=grid(["draft_model", "ngram"], [2], [0.0, 1.0])))
    validate(run)
    by_name = {setting["name"]: setting for setting in run["settings"]}
    assert by_name["plain"]["speedup"] is None
    assert by_name["draft_model k=2"]["speedup"]["median"] > 0
    assert by_name["draft_model k=2"]["lossless"] == {
        "outcome": "lossless",
        "passed": True,
        "detail": "3 of 3 outputs equal",
    }
    assert set(by_name["draft_model k=2"]["by_domain"]) == {"code", "chat"}
    assert "exact distribution" in by_name["draft_model k=2 T=1"]["lossless"]["detail"]


def run_of(seconds: float, steps: int) -> BatchRun:
    """Twelve tokens after so many seconds and steps."""
    return BatchRun([[0] * 12], SpecStats(12, steps, 12, 12 - steps, seconds), [], [])


def always_lossless(measurements: Measurements, name: str) -> LosslessResult:
    return LosslessResult(Outcome.LOSSLESS, "")


@pytest.mark.parametrize(("steps", "stated"), [(12, None), (6, 1.5)])
def test_a_speed_up_above_the_tokens_per_step_is_noise(steps: int, stated: float | None) -> None:
    """1.5x at 1 token a step, and at 2."""
    plan = toy_plan(settings=grid(["ngram"], [2], [0.0]))
    measurements = Measurements(plan)
    for setting, run in zip(plan.settings, (run_of(3.0, 12), run_of(2.0, steps))):
        for number in range(len(plan.batches)):
            measurements.add(SettingRun(str(setting), setting, 0, number, run))
    records = [setting_record(measurements, name, always_lossless, PASSES) for name in measurements.by_name]
    setting = setting_of({"settings": records}, "ngram")
    assert (setting["speedup"] and setting["speedup"]["median"]) == stated
    assert all(part["speedup"] == stated for part in setting["by_domain"].values())
    sentence = headline({"settings": records})
    noisy = "Noise, so without a speed-up: ngram k=2 (measured 1.50x, but 1.00 tokens a step" in sentence
    assert noisy is (stated is None) and ("Fastest: ngram" in sentence) is not noisy
    assert cells(setting)[3] == ("noise" if stated is None else "1.50x")


def test_no_draft_tokens_have_no_speed_up() -> None:
    plan = toy_plan(settings=grid(["ngram"], [0], [0.0]))
    measurements = Measurements(plan)
    for setting, run in zip(plan.settings, (run_of(3.0, 12), run_of(3.1, 12))):
        measurements.add(SettingRun(str(setting), setting, 0, 0, run))
    record = setting_record(measurements, "ngram k=0", always_lossless, PASSES)
    assert (record["speedup"], record["noise"], record["by_domain"]["code"]["speedup"]) == (None, None, None)


def off_by_one(tree: DraftTree, target: Tensor, uniforms: Tensor) -> VerifyResult:
    """Another token than the target's whenever there are draft tokens."""
    result = verify_tokens(tree, target, uniforms)
    return VerifyResult([], (result.next_token + 1) % VOCAB_SIZE) if len(tree) else result


@pytest.mark.slow
def test_no_speedup_is_stated_when_the_output_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    # A rule that calls itself lossless is not asked about greedy sequences: there the argmax decides.
    monkeypatch.setitem(RULES, "token", AcceptanceRule("token", off_by_one, lossless=False))
    run = toy_run(toy_candidates(), toy_plan(settings=grid(["draft_model"], [2], [0.0])))
    setting = setting_of(run, "draft_model")
    assert setting["lossless"]["outcome"] == "different"
    assert setting["speedup"] is None
    assert setting["predicted_speedup"] is None
    assert all(part["speedup"] is None for part in setting["by_domain"].values())
    validate(run)


@pytest.mark.slow
def test_no_speedup_is_stated_when_the_distribution_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "token", wrong_rule(resample_from_target))
    run = toy_run(toy_candidates(), toy_plan(settings=grid(["draft_model"], [2], [1.0])))
    setting = setting_of(run, "draft_model")
    assert (setting["lossless"]["outcome"], setting["speedup"]) == ("different", None)


@pytest.mark.slow
def test_an_interrupted_sweep_compares_only_what_both_sides_generated() -> None:
    run = toy_run(toy_candidates(), toy_plan(repeats=3), limit=19)  # the first repeat is 15 runs
    validate(run)
    speeds = {setting["name"]: setting["tokens_per_second"]["repeats"] for setting in run["settings"]}
    assert all(len(repeats) == 1 for repeats in speeds.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("temperature", "outcome"), [(0.0, "not shown"), pytest.param(1.0, "different", marks=pytest.mark.slow)]
)
def test_a_lossy_rule_is_never_called_lossless_and_has_no_speedup(temperature: float, outcome: str) -> None:
    """At temperature 0 its outputs happen to be plain decoding's, which does not make it exact."""
    settings = grid(["draft_model"], [2], [temperature], acceptance="lossy-typical")
    setting = setting_of(toy_run(toy_candidates(), toy_plan(settings=settings)), "draft_model")
    assert (setting["lossless"]["outcome"], setting["speedup"]) == (outcome, None)


@pytest.mark.slow
def test_too_few_draws_are_not_shown_and_have_no_speedup() -> None:
    plan = toy_plan(settings=grid(["draft_model"], [2], [1.0]))
    candidates = toy_candidates()
    check = LosslessCheck(candidates, SampleLimit(draws=800, seconds=0.0))
    record = setting_record(measured(candidates, plan), "draft_model k=2 T=1", check, PASSES)
    assert (record["lossless"]["outcome"], record["speedup"]) == ("not shown", None)
    assert "4 draws, at least 200 are needed" in record["lossless"]["detail"]
