"""Theory against counted tokens, and advice that follows from the figures."""

from __future__ import annotations

import pytest

from paceline.bench.candidates import Setting
from paceline.bench.measure import Length, Mark, Written, write
from paceline.bench.speedup_model import Answers, Habits, conditional_rates, habits_of, observed_curve
from paceline.bench.tune import Confirmed, Known, Prediction, TunePlan, advise, chosen, predictions, promising, tune
from paceline.core.cost_model import CostCurve, StepTiming
from paceline.core.draft_length import FixedDraftLength
from paceline.core.stats import SpecStats
from paceline.plan.predict import speedup
from tests.support.bench_toys import CONTEXT, toy_subject

FLAT = CostCurve({1: 1.0, 17: 1.0})


def habits(rates: list[float], draft: float = 0.0, **changes: float) -> Habits:
    values = {"offers": 1.0, "filled": 1.0, "depth": 1.0, "once": 0.0} | changes
    return Habits(len(rates), rates, draft=draft, **values)  # type: ignore[arg-type]


def test_with_a_constant_rate_the_prediction_is_the_textbook_formula() -> None:
    """a = .8, k = 4, c = .1: 3.3616 tokens a step and 2.40x."""
    answers = Answers(1000.0, 0.0, FLAT)
    mine = habits([0.8] * 4, draft=0.4)
    assert mine.tokens_per_step(4) == pytest.approx(3.3616)
    found = answers.speedup(mine, 4, CostCurve({0: 0.0, 4: 0.4}))
    assert found == pytest.approx(speedup(0.8, 4, 0.1)) == pytest.approx(2.4011, abs=1e-3)


def test_rounds_without_a_guess_and_branches_are_weighed() -> None:
    assert habits([1.0] * 4, offers=0.5).tokens_per_step(4) == pytest.approx(3.0)
    assert habits([1.0] * 4, filled=0.5).tokens_per_step(4) == pytest.approx(3.0)
    assert habits([0.5, 0.5], depth=0.25).tokens_per_step(4) == pytest.approx(1.5)
    assert habits([]).tokens_per_step(4) == 1.0


def test_rates_are_of_the_rounds_that_came_so_far() -> None:
    marks = [Mark(0, 2, 2, 0), Mark(1, 2, 2, 1), Mark(3, 2, 2, 2), Mark(6, 2, 2, 2)]
    assert conditional_rates(marks) == [0.75, pytest.approx(2 / 3)]


def test_tokens_per_step_predicted_from_one_run_are_those_of_another() -> None:
    """Habits learned at k = 6 predict tokens per step at k = 2 within 15%."""
    subject, prompts = toy_subject(), [CONTEXT, [1, 2, 3, 4], [3, 3, 0, 1], [2, 4, 1, 0]]
    length = Length(300)
    runs = {
        k: [write(subject, Setting("draft", k, 1.0), [ids], length, budget=FixedDraftLength(k), seed=5) for ids in prompts]
        for k in (2, 6)
    }
    predicted = habits_of(runs[6], 6, FLAT).tokens_per_step(2)
    seen = sum(run.stats.new_tokens for run in runs[2]) / sum(run.stats.steps for run in runs[2])
    assert predicted == pytest.approx(seen, rel=0.15)


def test_a_curve_is_put_right_by_what_real_passes_took() -> None:
    subject = toy_subject()
    runs = [write(subject, Setting("none"), [CONTEXT], Length(30), budget=FixedDraftLength(0))]
    fixed = observed_curve(CostCurve({1: 100.0, 5: 200.0}), runs)
    assert fixed.at(1) < 1.0
    assert fixed.at(5) == pytest.approx(2 * fixed.at(1))
    assert observed_curve(FLAT, []) is FLAT


def test_drafting_that_the_host_does_not_see_is_what_a_round_takes_beyond_a_pass() -> None:
    rounds = [StepTiming(0.1, 5.0, 4, 3, 1), StepTiming(0.1, 3.0, 4, 3, 1), StepTiming(0.1, 3.0, 4, 3, 1)]
    passes = CostCurve({1: 1.0, 4: 1.0})
    seen = habits_of([Written([], SpecStats(), rounds, [])], 3, passes)
    unseen = habits_of([Written([], SpecStats(), rounds, [], drafts_unseen=True)], 3, passes)
    assert (seen.draft, seen.once) == (pytest.approx(0.1), pytest.approx(0.0))
    assert (unseen.draft, unseen.once) == (pytest.approx(2.1), pytest.approx(2.0))


def test_what_a_draft_costs_once_sets_the_shortest_answer_worth_it() -> None:
    answers = Answers(100.0, 0.0, FLAT)
    mine = habits([1.0], once=10.0)  # two tokens a round instead of one: half a pass saved a token
    assert answers.shortest_worth_it(mine, 1, CostCurve({0: 0.0})) == 21
    assert answers.shortest_worth_it(habits([1.0]), 1, CostCurve({0: 0.0})) == 0
    assert answers.shortest_worth_it(habits([0.0], once=10.0), 1, CostCurve({0: 0.0})) == 0


def test_settings_far_behind_plain_decoding_are_not_run_to_the_end() -> None:
    def runs(tokens: int, seconds: float) -> list[Written]:
        stats = SpecStats()
        stats.new_tokens, stats.seconds = tokens, seconds
        return [Written([], stats, [], [])] * 2

    plain, good, near, far = runs(64, 2.0), runs(64, 1.5), runs(40, 2.0), runs(64, 3.5)
    found = {("none", 0): plain, ("good", 3): good, ("near", 3): near, ("far", 8): far}
    assert promising(found) == [("none", 0), ("good", 3), ("near", 3)]


def test_predictions_cover_every_k_and_the_best_of_each_method_is_run() -> None:
    known = {"good": Known({3: habits([0.9] * 3)}), "bad": Known({3: habits([0.1] * 3)})}
    found = predictions(known, Answers(100.0, 0.0, CostCurve({1: 1.0, 9: 2.0, 17: 4.0})))
    assert len(found) == 32
    assert found == sorted(found, key=lambda one: -one.speedup)
    assert [one.method for one in chosen(found)] == ["good", "bad"]


def advice_for(measured: float, once: float = 0.0) -> tuple[str, str]:
    known = {"draft": Known({3: habits([0.8] * 3, once=once)})}
    answers = Answers(100.0, 0.0, FLAT)
    found = [Prediction("draft", 3, 2.9, 0.8 if measured < 1 else 1.6)]
    output = advise(found, [Confirmed("draft", 3, found[0].speedup, measured)], known, answers)
    return output.sentence, output.method


def test_advice_says_when_not_to_speculate() -> None:
    sentence, method = advice_for(0.82)
    assert sentence.startswith("Do not speculate on this machine: predicted 0.80x")
    assert method == "none"


def test_advice_says_what_to_use_and_for_which_answers() -> None:
    sentence, method = advice_for(1.55, once=30.0)
    assert "Use method draft with k=3: measured 1.55x" in sentence
    assert "answers under 46 tokens: not worth it" in sentence
    assert method == "draft"
    assert "not worth it" not in advice_for(1.55)[0]


def test_without_any_method_the_advice_is_to_decode_plainly() -> None:
    output = advise([], [], {}, Answers(10.0, 0.0, FLAT))
    assert (output.method, output.num_draft_tokens) == ("none", 0)


def test_tuning_runs_from_end_to_end() -> None:
    from dataclasses import replace

    from paceline.core.cost_model import CostModel
    from paceline.core.draft_length import AdaptiveDraftLength

    def budget(method: str, k: int | str) -> FixedDraftLength | AdaptiveDraftLength:
        return FixedDraftLength(k) if isinstance(k, int) else AdaptiveDraftLength(CostModel(FLAT.copy()))

    tuning = tune(replace(toy_subject(), make_draft_length=budget), TunePlan([CONTEXT, [1, 2, 3]], Length(16), repeats=1))
    assert {one.method for one in tuning.predictions} == {"draft", "ngram"}
    assert [one.num_draft_tokens for one in tuning.confirmed][-1] == "auto"
    assert tuning.advice.sentence.endswith(".")
    assert tuning.verify.at(1) > 0
