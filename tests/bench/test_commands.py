"""bench, audit and tune as a user types them, on a tiny model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from paceline.bench.sampling_test import SampleLimit
from paceline.bench.tune import ConfirmedSpeedup, SpeedupEstimate, TuneAdvice, TuneResult
from paceline.cli import main
from paceline.cli.tune import _table
from paceline.core.cost_model import CostCurve, draft_curve
from paceline.core.verify import RULES
from paceline.heads.exit_adapter import ExitAdapter, ExitConfig
from paceline.heads.registry import save_head
from paceline.tuned import read_profile
from tests.bench.test_results import SCHEMA
from tests.support.wrong_rules import changes_a_twentieth, wrong_rule

SMALL = ["--limit", "2", "--max-new-tokens", "8", "--repeats", "1", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def output(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON document on the last line of stdout."""
    document: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return document


def bench(tiny: Path, *more: str) -> int:
    return main(["bench", str(tiny), "--prompts", "builtin:code,chat", *SMALL, *more])


@pytest.mark.slow
def test_bench_measures_saves_and_reports(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = ["--draft-model", str(tiny_folder), "--methods", "ngram,draft_model"]
    assert bench(tiny_folder, *pair, "-k", "2,auto", "--baselines", "hf") == 0
    document = output(capsys)
    names = {setting["name"] for setting in document["settings"]}
    assert names >= {"plain", "draft_model k=2", "draft_model k=auto", "transformers"}
    assert all(setting["lossless"] for setting in document["settings"])
    identity = document["id"]
    document = json.loads(Path("results.json").read_text())
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    assert document["runs"][0]["id"] == identity
    assert document["runs"][0]["draft_model"]["name"] == str(tiny_folder)
    assert "<svg" in Path("report.html").read_text()
    assert bench(tiny_folder, "--methods", "ngram", "-k", "2", "--report", "none", "--json") == 0
    assert len(json.loads(Path("results.json").read_text())["runs"]) == 2


@pytest.mark.slow
def test_an_interrupted_bench_keeps_what_it_measured(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from paceline.bench import sweep as module

    complete_sweep = module.sweep

    def interrupted(*args: Any) -> Any:
        for number, setting_run in enumerate(complete_sweep(*args)):
            if number == 2:
                raise KeyboardInterrupt
            yield setting_run

    monkeypatch.setattr(module, "sweep", interrupted)
    assert bench(tiny_folder, "--methods", "ngram", "-k", "2", "--report", "none") == 130
    assert output(capsys)["complete"] is False
    document = json.loads(Path("results.json").read_text())
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    assert document["runs"][0]["complete"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "magic"], "no method 'magic'"),
        (["--num-draft-tokens", "9..2"], "backwards"),
        (["--temperatures", "hot"], "--temperatures"),
        (["--repeats", "0"], "--repeats"),
        (["--prompts", "nowhere.txt"], "no file"),
        (["--acceptance", "sloppy"], "acceptance"),
        (["--baselines", "vllm9"], "baseline"),
        (["--methods", "draft_model"], "draft_model"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--text", "a.txt"], "--text goes with --against"),
        (["--against-dtype", "fp32"], "--against-dtype goes with --against"),
        (["--text-tokens", "9"], "--text-tokens goes with --against"),
    ],
)
def test_bench_says_what_is_wrong(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["bench", str(tiny_folder), *SMALL, "--methods", "ngram", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_audit_proves_the_table_lossless_and_catches_the_lossy_rule(capsys: pytest.CaptureFixture[str]) -> None:
    table = ["audit", "table", "--methods", "ngram,draft_model", "--quick"]
    assert main([*table, "--acceptance", "token", "--json"]) == 0
    document = output(capsys)
    assert document["outcome"] == "lossless"
    assert 0 < document["distance"] <= 0.2
    assert main([*table, "--acceptance", "lossy-typical", "--json"]) == 1
    document = output(capsys)
    assert document["outcome"] == "different"
    assert document["different"] == ["sampled ngram k=2 T=1 lossy-typical", "sampled draft_model k=2 T=1 lossy-typical"]


@pytest.mark.parametrize("rule", ["lossy-typical", "token"])
def test_an_audit_with_too_little_data_says_not_shown(capsys: pytest.CaptureFixture[str], rule: str) -> None:
    table = ["audit", "table", "--methods", "ngram,draft_model", "--quick"]
    assert main([*table, "--acceptance", rule, "--seconds", "0.01"]) == 3
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("not shown: sampled ngram k=2 T=1")
    assert "--seconds" in last


def test_an_audit_of_a_method_that_never_drafts_says_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "table", "--methods", "none", "--quick"]) == 3
    assert "no check could be made" in capsys.readouterr().out


@pytest.mark.slow
def test_an_audit_finds_a_rule_that_changes_one_token_in_twenty(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three checks, each with p below 1e-6 as a rule; that none of them finds it has a probability below 1e-6."""
    monkeypatch.setitem(RULES, "token", wrong_rule(changes_a_twentieth))
    command = ["audit", "table", "--methods", "draft_model", "--acceptance", "token", "--temperatures", "1"]
    assert main([*command, "--seconds", "300", "--json"]) == 1
    document = output(capsys)
    assert document["outcome"] == "different"
    assert {check["draws"] for check in document["checks"] if check["kind"] == "sampled"} == {2000}
    print([check["p_value"] for check in document["checks"]])


@pytest.mark.slow
def test_bench_says_of_a_lossy_rule_what_audit_says(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a speed-up nor `lossless`, however few draws there is time for."""
    from paceline.bench import results

    sampled = ["--methods", "ngram", "-k", "2", "--temperatures", "1", "--report", "none"]
    assert bench(tiny_folder, *sampled, "--acceptance", "lossy-typical") == 0
    setting = output(capsys)["settings"][1]
    assert setting["outcome"] in ("different", "not shown")
    assert setting["speedup"] is None
    monkeypatch.setattr(results, "SampleLimit", lambda **limits: SampleLimit(seconds=0.0))
    assert bench(tiny_folder, *sampled) == 0
    printed = capsys.readouterr().out
    setting = json.loads(printed.splitlines()[-1])["settings"][1]
    assert (setting["outcome"], setting["speedup"]) == ("not shown", None)
    assert "not shown" in printed


@pytest.mark.parametrize("content", ["{ not json", "[]", '{"format": "paceline results"}'])
def test_bench_finds_damaged_results_before_it_loads_a_model(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("paceline.build.open_model", fail)
    Path("results.json").write_text(content)
    assert bench(tiny_folder, "--methods", "ngram") == 2
    message = capsys.readouterr().err
    assert "results.json" in message and "--out" in message
    assert Path("results.json").read_text() == content


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("bench MISSING --temperatures x", "--temperatures takes numbers separated by commas, not 'x'"),
        ("bench MISSING -k 2..", "--num-draft-tokens takes 4, 2,4,8, 2..8 or auto, not '2..'"),
        ("audit MISSING --temperatures x", "--temperatures takes numbers separated by commas, not 'x'"),
        ("bench MISSING --methods ngrm", "there is no method 'ngrm'; the methods are none, draft_model"),
    ],
)
def test_a_list_that_cannot_be_read_is_found_before_a_model_is_loaded(
    argv: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "missing") if part == "MISSING" else part for part in argv.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", [["bench", "--report"], ["tune", "--out"], ["bench", "--out"]])
def test_a_file_that_cannot_be_written_is_found_before_a_model_is_loaded(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("paceline.build.open_model", fail)
    Path("file").write_text("")
    name, flag = command
    assert main([name, str(tiny_folder), *SMALL, "--methods", "ngram", flag, "file/inside"]) == 2
    assert capsys.readouterr().err.strip().endswith(f"file/inside cannot be written; choose another file with {flag}")


@pytest.mark.slow
def test_files_go_into_folders_that_are_missing_and_the_advice_is_printed(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--methods", "ngram", *SMALL, "--engines", "local"]
    assert main(["tune", str(tiny_folder), *arguments, "--out", "missing/paceline.toml"]) == 0
    assert read_profile(Path("missing/paceline.toml")).advice in capsys.readouterr().out
    assert bench(tiny_folder, "--methods", "ngram", "-k", "2", "--report", "none/report.html") == 0
    assert "<svg" in Path("none/report.html").read_text()


@pytest.mark.slow
def test_audit_of_a_transformers_model(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--methods",
        "ngram,draft_model",
        "--draft-model",
        str(tiny_folder),
        "--acceptance",
        "token",
        "--draws",
        "500",
        "--seconds",
        "300",
    ]
    assert main(["audit", str(tiny_folder), *arguments, "--quick"]) == 0
    out = capsys.readouterr().out
    assert "plain = transformers: 2 of 2" in out
    assert re.search(r"lossless: \d+ checks, false alarm probability 0.001", out)


@pytest.mark.slow
@pytest.mark.usefixtures("default_folder")
def test_audit_of_the_default_model(capsys: pytest.CaptureFixture[str]) -> None:
    """The large vocabulary and real logits, with few draws; the whole audit is a command of docs/measuring.md."""
    arguments = ["--methods", "suffix", "--acceptance", "token", "--draws", "500", "--seconds", "300"]
    assert main(["audit", *arguments, "--quick", "--device", "cpu", "--json"]) == 0
    assert [check["outcome"] for check in output(capsys)["checks"]] == ["lossless"] * 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--endpoint", "http://localhost:1"], "--against"),
        (["--alpha", "2"], "--alpha"),
        (["--draws", "3"], "--draws"),
        (["table", "--acceptance", "token,sloppy"], "sloppy"),
        (["table", "--methods", "eagle"], "eagle"),
        (["--endpoint", "http://127.0.0.1:9", "--against", "http://127.0.0.1:9"], "cannot be reached"),
        (["--endpoint", "notaurl", "--against", "http://127.0.0.1:9"], "'notaurl' is not the address of a server"),
        (["--endpoint", "http://", "--against", "http://127.0.0.1:9"], "is not the address of a server"),
        (["--endpoint", "http://a:b", "--against", "http://127.0.0.1:9"], "a:b"),
        (["big", "--endpoint", "http://127.0.0.1:9", "--against", "http://127.0.0.1:9"], "and big is one"),
        (["table", "--distance", "0"], "--distance"),
        (["table", "--seconds", "0"], "--seconds"),
    ],
)
def test_audit_says_what_is_wrong(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["audit", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.slow
def test_tune_writes_a_profile_and_one_sentence(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--methods", "ngram,draft_model", "--draft-model", str(tiny_folder), *SMALL]
    assert main(["tune", str(tiny_folder), *arguments]) == 0
    sentence = capsys.readouterr().out.splitlines()[-1]
    profile = read_profile(Path("paceline.toml"))
    assert profile.advice == sentence
    assert profile.target == str(tiny_folder)
    assert profile.pass_seconds[1] > 0
    assert main(["tune", str(tiny_folder), *arguments, "--out", "none", "--json"]) == 0
    assert {"sentence", "predictions", "confirmed"} <= set(output(capsys))


def test_the_table_of_tune_shows_noise_as_noise() -> None:
    confirmed = [ConfirmedSpeedup("ngram", 2, 1.1, 1.48, 1.0), ConfirmedSpeedup("ngram", "auto", None, 1.2, 1.5)]
    advice = TuneAdvice("", "ngram", "auto", None, 1.2)
    estimates = [SpeedupEstimate("ngram", 2, 1.0, 1.1)]
    table = _table(TuneResult(advice, estimates, confirmed, CostCurve({1: 1.0}), draft_curve()))
    assert list(table.columns[-1].cells) == ["noise", "1.20x"]


@pytest.mark.slow
def test_a_head_is_named_like_a_draft_model(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_head(ExitAdapter(ExitConfig(1, 32, 8)), tmp_path / "adapter")
    assert bench(tiny_folder, "--draft-model", str(tmp_path / "adapter"), "--methods", "layerskip", "-k", "2") == 0
    assert [setting["name"] for setting in output(capsys)["settings"]] == ["plain", "layerskip k=2"]
