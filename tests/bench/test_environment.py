"""The results file: appended to, never half written, never mistaken for another file."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from paceline import __version__
from paceline.bench.environment import load_runs, save_run, versions
from paceline.errors import OptionError


def test_results_name_the_version_of_the_code_that_ran() -> None:
    assert versions()["paceline"] == __version__


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


@pytest.mark.slow
def test_processes_that_append_at_once_lose_nothing(tmp_path: Path) -> None:
    out = str(tmp_path / "results.json")
    workers = [multiprocessing.get_context("fork").Process(target=_save_many, args=(out, n)) for n in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(load_runs(Path(out))) == 30
