"""benchmarks/lint_plants.py: what it counts as right, and what a second run takes from the first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lint_planted import COPIES, HEADS
from benchmarks.lint_plants import Results, Trial, TrialResult, summary, trials


def result_of(trial: Trial, *named: str) -> TrialResult:
    return TrialResult(trial, named, 64, 2.0, 0.1, 5.0, 1e-6, 1.5)


def test_every_mistake_and_every_copy_is_a_trial() -> None:
    listed = trials("dflash", [0, 1], ("mistakes", "copies"))
    assert len(listed) == len(HEADS["dflash"].mistakes) + 2 * len(COPIES) == len(set(listed))
    assert {trial.seed for trial in listed if trial.kind == "mistakes"} == {0}
    named = [mistake for head in HEADS.values() for mistake in head.mistakes.values() if mistake.names]
    assert len(named) >= 20


def test_results_are_read_back_as_they_were(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    assert results.known() == {}
    mistake = Trial("dflash", "mistakes", "mask token", 0, HEADS["dflash"].mistakes["mask token"].names)
    copy = Trial("eagle", "copies", "sparse", 1)
    for result in (result_of(mistake, "mask token 16"), result_of(copy)):
        results.add(result)
    assert results.known() == {mistake: result_of(mistake, "mask token 16"), copy: result_of(copy)}


@pytest.mark.parametrize(
    ("named", "status", "count"), [(("mask token 16",), 0, 1), ((), 1, 0), (("causal on",), 1, 0)]
)
def test_only_the_expected_readings_are_right(capsys: Any, named: tuple[str, ...], status: int, count: int) -> None:
    trial = Trial("dflash", "mistakes", "mask token", 0, ("mask token 16",))
    assert summary([result_of(trial, *named)]) == status
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["right"] == {"dflash mistakes": [count, 1]}
