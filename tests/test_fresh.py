"""benchmarks/fresh.py: rows in processes of their own, and what its table may claim."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import engines, fresh
from benchmarks.fresh import COLUMNS, ComparedRow, jobs_of, main, parse, row_options, table
from benchmarks.fresh_process import FreshResult, Job, Pass, in_fresh_process, run_job
from tests.support.foreign_engine import OPENED, register_foreign


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


# --- other engines ----------------------------------------------------------------------------------------------------


def test_a_row_of_another_engine_names_it_with_its_model_and_python(capsys: pytest.CaptureFixture[str]) -> None:
    rows = "plain,ngram:5,foreign/plain,foreign/ngram:3,absent/plain"
    with register_foreign():
        from paceline.engines import registry

        absent = registry.EngineSpec("absent", "", registry.spec("foreign").open, packages=("no_such_package",))
        registry.register(absent)
        try:
            args = parse(["--rows", rows, "--python", "foreign=/opt/python"])
            jobs = jobs_of(args, ["x"], 1)
        finally:
            registry._REGISTERED.pop("absent")
    assert [(job.name, job.engine, job.method, job.python) for job in jobs] == [
        ("ngram:5", "local", "ngram", None),
        ("foreign/plain", "foreign", "none", "/opt/python"),
        ("foreign/ngram:3", "foreign", "ngram", "/opt/python"),
    ]
    assert "absent/plain: not measured, no_such_package is not installed" in capsys.readouterr().err


@pytest.mark.slow
def test_a_row_of_another_engine_is_measured_through_the_decoder(tiny_folder: Path) -> None:
    with register_foreign():
        jobs = [
            Job("foreign/ngram:3", 1, ["abcabc"], str(tiny_folder), method=method, num_draft_tokens=k, engine="foreign",
                max_new_tokens=8, device="cpu")
            for method, k in (("none", 0), ("ngram", 3))
        ]  # fmt: skip
        plain, drafted = (run_job(job, 0.0) for job in jobs)
    assert plain.first.outputs == drafted.first.outputs and drafted.first.tokens == 8
    assert [config.engine for config in OPENED] == ["foreign", "foreign"]


def test_a_gain_over_another_engine_is_never_called_noise() -> None:
    """Tokens per step limit what speculation gains over the same engine, not what one engine gains over another."""
    plain, fast = result("plain", 2.0), result("foreign/plain", 1.0)
    foreign = FreshResult(Job("foreign/plain", 1, ["x"], "m", engine="foreign"), fast.first, fast.warm)
    assert ComparedRow(foreign, plain).gain("first") == "2.00"


@pytest.mark.slow
def test_a_row_of_our_own_engine_may_be_named_in_full(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "abcabc"}) + "\n")
    arguments = ["--model", str(tiny_folder), "--prompts", str(tmp_path / "prompts.jsonl"), "--plain-once"]
    assert main([*arguments, "--rows", "local/ngram:3", "--max-new-tokens", "6", "--device", "cpu"]) == 0
    assert "| local/ngram:3 | 1 |" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="there is no engine 'nowhere'"):
        main([*arguments, "--rows", "nowhere/plain"])


# --- every engine in one run ------------------------------------------------------------------------------------------


def test_one_run_measures_every_engine_on_both_models_each_row_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The processes themselves are those of the tests above."""
    jobs: list[Job] = []

    def record(job: Job) -> FreshResult:
        jobs.append(job)
        return FreshResult(job, Pass(8, 1.0, 4, 4, [[1]]), Pass(8, 1.0, 4, 4, [[1]]), 2.0)

    monkeypatch.setattr(fresh, "in_fresh_process", record)
    pair = ["--target", "BIG", "--draft", "SMALL", "--gguf", "big.gguf", "--gguf-draft", "small.gguf"]
    out = tmp_path / "engines.md"
    pythons = ["--python", "vllm=/opt/python", "--python", "llama_cpp=/opt/python"]
    assert engines.main([*pair, *pythons, "--out", str(out), "--row-seconds", "60"]) == 0
    names = [(job.model, job.dtype, job.name) for job in jobs]
    assert len(names) == len(set(names))
    in_float32 = [job.name for job in jobs if job.model == "BIG" and job.dtype == "fp32"]
    assert in_float32 == ["plain", "draft:3", "vllm/plain", "vllm/draft:3", "transformers", "transformers, assisted"]
    assert {job.draft for job in jobs if job.engine == "llama_cpp" and job.method == "draft_model"} == {"small.gguf"}
    assert all(job.engine_options["enforce_eager"] is True for job in jobs if job.engine == "vllm")
    assert {job.row_seconds for job in jobs} == {60.0}
    assert out.read_text().count("| vllm/plain |") == 2 and out.read_text() in capsys.readouterr().out
    with pytest.raises(SystemExit):
        engines.main(["--target", "BIG"])


def test_a_row_that_takes_too_long_is_given_up(tiny_folder: Path) -> None:
    result = in_fresh_process(Job("plain", 1, ["abc"], str(tiny_folder), row_seconds=0.05))
    assert result.error == "not finished after 0.05 s"
