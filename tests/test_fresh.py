"""benchmarks/fresh.py: rows in processes of their own, and what its table may claim."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.fresh import COLUMNS, ComparedRow, FreshResult, Job, Pass, main, row_options, table


def result(name: str, seconds: float, *, tokens: int = 100, steps: int = 100, error: str | None = None) -> FreshResult:
    job = Job(name, 1, ["x"], "m")
    run = Pass(tokens, seconds, steps, tokens - steps, [[1, 2]])
    return FreshResult(job, run, run, 1.0, error)


def test_a_gain_above_the_tokens_per_step_is_marked_as_noise() -> None:
    plain = result("plain", 1.47)
    assert ComparedRow(result("ngram", 1.0, steps=93), plain).gain("first") == "noise (1.47)"
    assert ComparedRow(result("ngram", 1.0, steps=50), plain).gain("first") == "1.47"


def test_a_row_that_failed_says_so_in_the_table() -> None:
    rows = [ComparedRow(result("eagle", 1.0, error="no head"), result("plain", 1.0))]
    line = table(rows).splitlines()[-1]
    assert "failed: no head" in line
    assert line.count("|") == len(COLUMNS) + 1


def test_rows_name_methods_and_draft_lengths() -> None:
    assert row_options("ngram:5", "small") == {"method": "ngram", "num_draft_tokens": 5, "draft": None}
    assert row_options("draft:auto", "small") == {
        "method": "draft_model",
        "num_draft_tokens": "auto",
        "draft": "small",
    }
    for wrong in ("magic", "ngram:many", "draft:5"):
        with pytest.raises(SystemExit, match=r"fresh\.py"):
            row_options(wrong, None)


@pytest.mark.slow
def test_every_row_runs_in_a_fresh_process_and_equals_plain(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(2 * (json.dumps({"id": "a", "category": "code", "prompt": "abcabc"}) + "\n"))
    arguments = ["--model", str(tiny_folder), "--prompts", str(prompts), "--rows", "plain,ngram:3"]
    limits = ["--max-new-tokens", "8", "--device", "cpu", "--peers", "llama_cpp,nothing"]
    out = tmp_path / "out.json"
    assert main([*arguments, *limits, "--json", str(out)]) == 0
    printed = capsys.readouterr()
    assert "| ngram:3 | 1 |" in printed.out
    assert "2 of 2" in printed.out
    assert "nothing: not measured, there is no such peer" in printed.err
    document = json.loads(out.read_text())
    assert [len(row["first"]["outputs"]) for row in document["results"]] == [2, 2]
    assert all(row["ready"] > 0 for row in document["results"])
