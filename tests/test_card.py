"""The run over all rows of a card: in order, gone on with after a cut, and never begun without time to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import card
from benchmarks.fresh_process import FreshResult, Job, Pass

PAIR = ["--pair", "big", "small", "--limit-prompts", "1", "--only", "pair;pair, further;pair, 8 at a time;pair, vLLM"]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Jobs that were run: no process is started."""
    jobs: list[Job] = []

    def run(job: Job) -> FreshResult:
        jobs.append(job)
        one = Pass(tokens=10 * len(jobs), seconds=1.0, steps=10, accepted=5, outputs=[[1, 2]])
        return FreshResult(job, one, one, ready=2.0)

    monkeypatch.setattr(card, "in_fresh_process", run)
    return jobs


def test_rows_are_measured_once_and_shown_again(
    measured: list[Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "card.json")]
    assert card.main([*PAIR, *out]) == 0
    names = [(job.name, job.batch) for job in measured]
    assert len(set(names)) == len(names), "a row is in several sections and is measured once"
    assert names[:3] == [("plain", 1), ("draft:3", 1), ("draft:auto", 1)]
    assert {name for name, batch in names if batch == 8} == {"plain", "draft:3"}
    assert {(job.model, job.draft) for job in measured if job.name == "draft:3"} == {("big", "small")}
    assert all(job.dtype == "bf16" and job.device == "cuda" for job in measured)
    first = capsys.readouterr().out
    assert "| draft:3 | 1 | 20.0 |" in first and "vllm" not in first
    assert card.main([*PAIR, *out]) == 0
    assert len(measured) == len(names) and capsys.readouterr().out == first


def test_a_row_of_batches_has_enough_prompts_to_keep_them_full(measured: list[Job], tmp_path: Path) -> None:
    files = [tmp_path / "code.jsonl", tmp_path / "chat.jsonl"]
    for path in files:
        path.write_text("".join(f'{{"prompt": "{path.stem} {number}"}}\n' for number in range(20)))
    card.main([*PAIR, "--out", str(tmp_path / "card.json"), "--prompts", *map(str, files)])
    assert {len(job.prompts) for job in measured if job.batch == 1} == {2}
    assert {len(job.prompts) for job in measured if job.batch == 8} == {24}
    assert all(sum("chat" in prompt for prompt in job.prompts) == len(job.prompts) // 2 for job in measured)


def test_no_row_begins_without_time_to_end(measured: list[Job], tmp_path: Path) -> None:
    card.main([*PAIR, "--out", str(tmp_path / "card.json"), "--seconds", "10"])
    assert measured == []


def test_rows_of_vllm_run_in_the_python_that_has_it(measured: list[Job], tmp_path: Path) -> None:
    card.main([*PAIR, "--out", str(tmp_path / "card.json"), "--python", "vllm=/opt/python"])
    rows = [job for job in measured if job.engine == "vllm"]
    assert [job.name for job in rows] == ["vllm/plain", "vllm/draft:3"]
    assert all(job.python == "/opt/python" and job.model == "big" for job in rows)


def test_single_rows_of_a_section_can_be_named(
    measured: list[Job], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--pair", "big", "small", "--limit-prompts", "1", "--out", str(tmp_path / "card.json"), "--only"]
    card.main([*run, "pair: plain"])
    card.main([*run, "pair: draft:auto, ngram:5; pair, 8 at a time: draft:3"])
    names = [(job.name, job.batch) for job in measured]
    assert names == [("plain", 1), ("draft:auto", 1), ("ngram:5", 1), ("draft:3", 8)]
    table = capsys.readouterr().out
    assert "| draft:auto | 1 | 20.0 | 20.0 | 1.00 | noise (2.00) |" in table, "compared with what was measured before"
    assert "| draft:3 | 8 | 40.0 | 40.0 | 1.00 | - |" in table, "without plain decoding there is no gain"
    with pytest.raises(SystemExit, match="no section is called pears"):
        card.main([*run, "pears"])
