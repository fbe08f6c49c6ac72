"""benchmarks/domains.py: `auto` against each method alone, by domain."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.domains import DOMAINS, EDITS, DomainRow, auto_over_best, domain_prompts, job_of, main, parse, table
from benchmarks.fresh_process import FreshResult, Job, JobInTurns, Pass, in_turns


def row(name: str, rate: float, different: int = 0) -> DomainRow:
    domains = (*DOMAINS, EDITS)
    return DomainRow(name, dict.fromkeys(domains, 100), dict.fromkeys(domains, 100 / rate), different)


def test_auto_is_compared_with_the_best_of_the_others_in_each_domain() -> None:
    rows = [row("plain", 100.0), row("ngram:3", 120.0), row("auto", 117.6)]
    rows[0].seconds["chat"] = 0.5  # plain is best there
    assert auto_over_best(rows, "code") == pytest.approx(0.98)
    assert auto_over_best(rows, "chat") == pytest.approx(117.6 / 200)
    last = table("int8", rows)[-1]
    assert last[:3] == ["auto / best single", "0.980", "0.588"]


def test_tokens_and_seconds_count_for_the_domain_of_their_prompt() -> None:
    prompts = domain_prompts(1)
    assert [prompt.domain for prompt in prompts] == [*DOMAINS, EDITS]
    outputs = [[1] * count for count in range(1, 6)]
    result = FreshResult(Job("x", 1, [], "m"), Pass(15, 5.0, 5, 0, outputs, [0.5, 1.0, 1.0, 1.0, 2.0]))
    measured = DomainRow("x")
    measured.add(result, prompts, [*outputs[:4], [9]])
    assert measured.rate("code") == 2.0 and measured.rate(EDITS) == 2.5 and measured.different == 1


def test_only_rows_that_use_predictions_get_them() -> None:
    prompts, args = domain_prompts(2), parse([])
    for name in args.rows.split(","):
        predictions = job_of(name, "int8", args, prompts).predictions
        assert (predictions is not None) == (name in ("auto", "prediction:auto"))
    edited = [prompts[8].prediction, prompts[9].prediction]
    assert job_of("auto", "int8", args, prompts).predictions == [*[None] * 8, *edited]


@pytest.mark.slow
@pytest.mark.parametrize("order", [[], ["--apart"]])
def test_one_command_prints_the_table(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], order: list[str]
) -> None:
    out = tmp_path / "out.json"
    limits = ["--limit-prompts", "1", "--max-new-tokens", "4", "--repeats", "1", "--rows", "plain,auto"]
    arguments = ["--model", str(tiny_folder), "--dtype", "fp32", "--device", "cpu", *limits, *order]
    assert main([*arguments, "--json", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| fp32 | code | chat | maths | summarising | edits |")
    assert lines[-1].startswith("| auto / best single | ")
    [plain, auto] = json.loads(out.read_text())["fp32"]
    assert plain["tokens"] == auto["tokens"] == dict.fromkeys((*DOMAINS, EDITS), 4)


@pytest.mark.slow
def test_processes_that_take_turns_are_measured_and_one_that_fails_says_why(tiny_folder: Path) -> None:
    fine = Job("plain", 1, ["a", "b"], str(tiny_folder), dtype="fp32", device="cpu", max_new_tokens=4, once=True)
    missing = replace(fine, name="missing", model=str(tiny_folder / "nothing"))
    first, failed, second = in_turns([fine, missing, fine])
    assert first.error is None and first.first.tokens == 8 and len(first.first.each) == 2
    assert first.first.outputs == second.first.outputs
    assert failed.error is not None and "nothing" in failed.error


@pytest.mark.slow
def test_a_process_that_is_done_stays_until_all_are(tiny_folder: Path, tmp_path: Path) -> None:
    job = Job("plain", 1, ["a"], str(tiny_folder), dtype="fp32", device="cpu", max_new_tokens=4, once=True)
    process = JobInTurns(replace(job, in_turns=True), tmp_path)
    try:
        process.take_turn()
        with pytest.raises(subprocess.TimeoutExpired):
            process.process.wait(timeout=3)
        assert process.result().first.tokens == 4
    finally:
        process.end()
