"""Interleaving, counting, and what becomes of the measurements."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from paceline.bench.candidates import Setting, Subject
from paceline.bench.environment import load_runs, new_run, save_run
from paceline.bench.measure import Length, write
from paceline.bench.results import Collected, LosslessCheck, setting_record
from paceline.bench.sweep import SweepPlan, grid, parse_draft_tokens, parse_numbers, sweep, tasks_of
from paceline.core.cost_model import CostCurve
from paceline.core.draft_length import FixedDraftLength
from paceline.engines.local.verifier import Verifier
from paceline.errors import OptionError
from tests.support.bench_toys import CONTEXT, PlantedJudge, toy_subject

SCHEMA = Path(__file__).parents[2] / "docs" / "results.schema.json"
PASSES = CostCurve({1: 0.001, 9: 0.002})


def toy_plan(**changes: Any) -> SweepPlan:
    tasks = tasks_of(["code", "code", "chat"], [CONTEXT, [1, 2, 3, 1, 2], [4, 0, 4, 0]], 1)
    first = SweepPlan(grid(["draft", "ngram"], [2, 4], [0.0]), tasks, Length(12), repeats=2)
    return replace(first, **changes)


def measured(subject: Subject, plan: SweepPlan) -> Collected:
    collected = Collected(plan)
    for one in sweep(subject, plan):
        collected.add(one)
    return collected


def toy_run(subject: Subject, plan: SweepPlan, collected: Collected | None = None) -> dict[str, Any]:
    """A run as `paceline bench` records it."""
    collected = collected or measured(subject, plan)
    run = new_run(["paceline", "bench"], subject.target.info, None)
    check = LosslessCheck(subject)
    run |= {
        "complete": True,
        "pass_seconds": {"1": 0.001},
        "settings": [setting_record(collected, name, check, PASSES) for name in collected.by_name],
        "workload": {
            "source": "toy",
            "prompts": 3,
            "domains": ["code", "chat"],
            "max_new_tokens": 12,
            "ignore_eos": False,
            "batch": 1,
            "repeats": 2,
            "seed": 0,
        },
    }
    return run


def validate(run: dict[str, Any]) -> None:
    jsonschema.validate({"format": "paceline results", "runs": [run]}, json.loads(SCHEMA.read_text()))


@pytest.mark.parametrize(
    ("text", "found"),
    [("4", [4]), ("2..5", [2, 3, 4, 5]), ("1,4..5,auto,4", [1, 4, 5, "auto"]), ("0", [0])],
)
def test_draft_tokens_are_numbers_ranges_and_auto(text: str, found: list[int | str]) -> None:
    assert parse_draft_tokens(text) == found


@pytest.mark.parametrize("text", ["", "x", "5..2", "-1", "1..999", "2.5", "auto5"])
def test_impossible_draft_tokens_are_refused(text: str) -> None:
    with pytest.raises(OptionError):
        parse_draft_tokens(text)


def test_numbers_and_batches_are_checked() -> None:
    assert parse_numbers("0,0.7,0", "--temperatures") == [0.0, 0.7]
    for text in ("warm", "-1", "nan", "inf"):
        with pytest.raises(OptionError, match="--temperatures"):
            parse_numbers(text, "--temperatures")
    with pytest.raises(OptionError, match="--batch"):
        tasks_of(["a"], [[1]], 0)
    with pytest.raises(OptionError, match="settings"):
        grid(["a", "b"], list(range(100)), [0.0, 1.0])


def test_a_grid_has_plain_decoding_first_at_every_temperature() -> None:
    found = grid(["none", "ngram"], [2, "auto"], [0.0, 0.7])
    assert [str(setting) for setting in found] == [
        "plain",
        "ngram k=2",
        "ngram k=auto",
        "plain T=0.7",
        "ngram k=2 T=0.7",
        "ngram k=auto T=0.7",
    ]


def test_batches_never_mix_domains() -> None:
    tasks = tasks_of(["a", "b", "a", "a"], [[1], [2], [3], [4]], 2)
    assert [(task.domain, task.prompts) for task in tasks] == [("a", [[1], [3]]), ("a", [[4]]), ("b", [[2]])]


def test_settings_take_turns_and_the_order_rotates() -> None:
    plan = toy_plan()
    order = [(one.repeat, one.task, one.name) for one in sweep(toy_subject(), plan)]
    assert len(order) == plan.total
    first = [name for repeat, task, name in order if (repeat, task) == (0, 0)]
    second = [name for repeat, task, name in order if (repeat, task) == (0, 1)]
    assert sorted(first) == sorted(second)
    assert first[0] != second[0]


def test_both_sides_are_counted_alike_and_the_text_is_the_same() -> None:
    subject = toy_subject()
    plain = write(subject, Setting("none"), [CONTEXT], Length(20), budget=FixedDraftLength(0))
    guessed = write(subject, Setting("draft", 3), [CONTEXT], Length(20), budget=FixedDraftLength(3))
    assert plain.answers == guessed.answers
    assert plain.stats.new_tokens == guessed.stats.new_tokens == 20
    assert plain.stats.steps == 20
    assert guessed.stats.steps + guessed.stats.accepted == 20
    assert sum(mark.accepted for mark in guessed.marks) == guessed.stats.accepted
    spent = guessed.draft_seconds + guessed.verify_seconds + guessed.other_seconds
    assert spent == pytest.approx(guessed.stats.seconds)


def test_a_run_fits_the_schema() -> None:
    run = toy_run(toy_subject(), toy_plan(settings=grid(["draft", "ngram"], [2], [0.0, 1.0])))
    validate(run)
    by_name = {one["name"]: one for one in run["settings"]}
    assert by_name["plain"]["speedup"] is None
    assert by_name["draft k=2"]["speedup"]["median"] > 0
    assert by_name["draft k=2"]["lossless"] == {"passed": True, "detail": "3 of 3 texts equal"}
    assert set(by_name["draft k=2"]["by_domain"]) == {"code", "chat"}
    assert "exact distribution" in by_name["draft k=2 T=1"]["lossless"]["detail"]


class OffByOne(Verifier):
    """Says another token than the target's whenever guesses were offered."""

    def verified_rows(self, texts: Any, trees: Any, outputs: Any) -> Any:
        good = super().verified_rows(texts, trees, outputs)
        return [
            replace(one, path=[], token=(one.token + 1) % 5) if len(tree) else one for one, tree in zip(good, trees)
        ]


def test_no_speedup_is_stated_when_the_text_is_another() -> None:
    run = toy_run(replace(toy_subject(), make_judge=OffByOne), toy_plan(settings=grid(["draft"], [2], [0.0])))
    (setting,) = [one for one in run["settings"] if one["method"] == "draft"]
    assert not setting["lossless"]["passed"]
    assert setting["speedup"] is None
    assert setting["predicted_speedup"] is None
    assert all(part["speedup"] is None for part in setting["by_domain"].values())
    validate(run)


def test_no_speedup_is_stated_when_the_distribution_is_another() -> None:
    subject = replace(toy_subject(), make_judge=PlantedJudge)
    run = toy_run(subject, toy_plan(settings=grid(["ngram"], [2], [1.0])))
    (setting,) = [one for one in run["settings"] if one["method"] == "ngram"]
    assert (setting["lossless"]["passed"], setting["speedup"]) == (False, None)


def test_a_sweep_cut_short_compares_only_what_both_sides_wrote() -> None:
    plan, collected = toy_plan(repeats=3), Collected(toy_plan(repeats=3))
    for number, one in enumerate(sweep(toy_subject(), plan)):
        if number == 19:  # the first repeat is 15 measurements
            break
        collected.add(one)
    run = toy_run(toy_subject(), plan, collected)
    validate(run)
    speeds = {one["name"]: one["tokens_per_second"]["repeats"] for one in run["settings"]}
    assert all(len(repeats) == 1 for repeats in speeds.values())


def test_results_are_appended_and_a_run_replaces_itself(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "results.json"
    save_run(out, {"id": "a", "n": 1})
    save_run(out, {"id": "b", "n": 1})
    save_run(out, {"id": "a", "n": 2})
    assert [(run["id"], run["n"]) for run in load_runs(out)] == [("b", 1), ("a", 2)]
    assert sorted(path.name for path in out.parent.iterdir() if not path.name.endswith(".lock")) == ["results.json"]


def test_a_file_of_another_kind_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "notes.json"
    out.write_text('{"my": "notes"}')
    with pytest.raises(OptionError, match="not a results file"):
        save_run(out, {"id": "a"})
    assert out.read_text() == '{"my": "notes"}'


def _save_many(path: str, first: int) -> None:
    for number in range(10):
        save_run(Path(path), {"id": f"{first}-{number}"})


def test_processes_that_append_at_once_lose_nothing(tmp_path: Path) -> None:
    out = str(tmp_path / "results.json")
    workers = [multiprocessing.get_context("fork").Process(target=_save_many, args=(out, n)) for n in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(load_runs(Path(out))) == 30
