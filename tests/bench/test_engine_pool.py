"""bench and audit over engines that show nothing but their outputs, as a user types them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from paceline.cli import main
from tests.bench.test_results import SCHEMA
from tests.support.foreign_engine import OPENED, register_foreign

SMALL = ["--limit", "2", "--max-new-tokens", "12", "--repeats", "1", "--device", "cpu"]
AUDIT = ["--quick", "--draws", "200", "--seconds", "3000", "--device", "cpu", "--distance", "0.3", "--json"]


@pytest.fixture(autouse=True)
def _foreign_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACELINE_PROFILE", raising=False)
    with register_foreign():
        yield


def document_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return document


def bench(folder: Path, *more: str) -> int:
    return main(["bench", str(folder), *SMALL, *more])


@pytest.mark.slow
def test_an_engine_configured_at_start_is_opened_for_each_setting_and_recorded_like_our_own(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tiny_folder, "--engine", "foreign", "--methods", "ngram", "-k", "3,auto") == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out.splitlines()[-1])
    assert [setting["name"] for setting in document["settings"]] == ["plain", "ngram k=3"]
    plain, drafted = document["settings"]
    assert drafted["lossless"] and drafted["tokens_per_step"] >= 1
    assert plain["tokens_per_second"] > 0
    assert "not measured: ngram k=auto (the engine foreign needs a number of draft tokens)" in printed.out
    results = json.loads(Path("results.json").read_text())
    jsonschema.validate(results, json.loads(SCHEMA.read_text()))
    assert results["runs"][0]["engine"] == "foreign"
    is_noise = results["runs"][0]["settings"][1]["noise"] is not None  # of a tiny model on a busy machine
    assert (drafted["speedup"] is None) if is_noise else drafted["speedup"] > 0
    assert "<svg" in Path("report.html").read_text()
    assert [config.speculative.method for config in OPENED] == ["none", "ngram"]
    assert all(config.cache.prefix_cache_tokens == 0 for config in OPENED)


@pytest.mark.slow
def test_an_engine_that_takes_the_method_with_a_request_is_opened_once_and_settings_take_turns(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from paceline.bench.engine_pool import EnginePool

    turns: list[str] = []
    run = EnginePool.run

    def recorded(pool: EnginePool, setting: Any, *rest: Any) -> Any:
        turns.append(str(setting))
        return run(pool, setting, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EnginePool, "run", recorded)
        assert bench(tiny_folder, "--engine", "roaming", "-k", "2", "--report", "none") == 0
    document = document_of(capsys)
    assert len(OPENED) == 1
    assert turns[-4:] == ["plain", "ngram k=2", "ngram k=2", "plain"]
    assert document["settings"][1]["lossless"]
    [run_record] = json.loads(Path("results.json").read_text())["runs"]
    assert [setting["stats"]["drafted"] > 0 for setting in run_record["settings"]] == [False, True]


@pytest.mark.slow
def test_a_greedy_difference_of_an_engine_takes_its_speedup_away(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = ["--engine", "foreign", "--engine-option", "broken=token", "--methods", "ngram", "-k", "2"]
    assert bench(tiny_folder, *broken, "--report", "none") == 0
    setting = document_of(capsys)["settings"][1]
    assert (setting["outcome"], setting["speedup"]) == ("different", None)


@pytest.mark.slow
def test_audit_shows_an_exact_engine_lossless(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A false alarm has probability 0.001."""
    command = ["audit", str(tiny_folder), "--engine", "foreign", "--methods", "draft_model", *AUDIT]
    assert main([*command, "--draft-model", str(tiny_folder), "--temperatures", "0.5"]) == 0
    document = document_of(capsys)
    assert document["outcome"] == "lossless"
    names = [check["name"] for check in document["checks"]]
    assert names == [
        "greedy draft_model k=2 = plain",
        "sampled draft_model k=2 T=0.5 without seeds context 1",
        "sampled draft_model k=2 T=0.5 with seeds context 1",
    ]
    assert [config.speculative.method for config in OPENED] == ["none", "draft_model"]


@pytest.mark.slow
@pytest.mark.parametrize(("broken", "temperature"), [("token", "0"), ("sampling", "1")])
def test_audit_finds_an_engine_that_changes_its_output(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str], broken: str, temperature: str
) -> None:
    """Two samples at temperatures 1 and 1/3 hardly overlap: that 200 draws miss it has a probability below 1e-6."""
    command = ["audit", str(tiny_folder), "--engine", "foreign", "--engine-option", f"broken={broken}"]
    command += ["--methods", "ngram", *AUDIT]
    assert main([*command, "--temperatures", temperature]) == 1
    document = document_of(capsys)
    different = document["different"]
    print([check["p_value"] for check in document["checks"]])
    assert different and all(name.startswith("greedy" if broken == "token" else "sampled") for name in different)


@pytest.mark.slow
def test_a_method_that_drafts_nothing_shows_nothing(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["audit", str(tiny_folder), "--engine", "foreign", "--methods", "none", *AUDIT]
    assert main([*command, "--temperatures", "0"]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--engine", "foreign", "--methods", "medusa"], "foreign has no method 'medusa'; it has none, ngram"),
        (["bench", "--engine", "nowhere"], "engine must be one of"),
        (["bench", "--engine", "foreign", "--baselines", "hf"], "--engine local"),
        (["audit", "--engine", "foreign", "--acceptance", "token,block"], "one rule at a time"),
    ],
)
def test_what_an_engine_does_not_have_is_said_before_it_is_opened(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([arguments[0], str(tiny_folder), *arguments[1:]]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and not OPENED


# --- servers ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_that_drafts_as_it_was_started_is_one_setting_without_a_speedup(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(tiny_folder, "--engine", "running", "--report", "none") == 0
    [setting] = document_of(capsys)["settings"]
    assert (setting["name"], setting["speedup"], setting["outcome"]) == ("server k=auto", None, "not shown")
    assert len(OPENED) == 1
    assert main(["audit", str(tiny_folder), "--engine", "running", *AUDIT]) == 2
    assert "--endpoint URL --against URL" in capsys.readouterr().err
    assert main(["tune", str(tiny_folder), "--engines", f"running={tiny_folder}", *SMALL, "--json"]) == 0
    assert document_of(capsys)["sentence"].startswith("running with server k=auto is fastest on this machine")


@pytest.mark.slow
def test_a_paceline_server_is_benched_and_audited_over_http(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real socket; the server takes the method with the request, so plain decoding and n-grams take turns."""
    from paceline.serve.config import ServerConfig
    from tests.serve.running import serving_model
    from tests.support.tiny import byte_tokenizer, tiny_llama

    with serving_model(tiny_llama(), byte_tokenizer(), ServerConfig(("tiny",)), num_draft_tokens=3) as running:
        engine = ["--engine", "http", "--engine-option", f"url={running.url}"]
        engine += ["--engine-option", f"tokenizer={tiny_folder}", "--methods", "ngram"]
        assert main(["bench", "tiny", *SMALL, *engine, "-k", "3", "--report", "none"]) == 0
        plain, drafted = document_of(capsys)["settings"]
        assert (plain["name"], drafted["name"], drafted["lossless"]) == ("plain", "ngram k=3", True)
        assert plain["tokens_per_step"] == 1
        assert main(["audit", "tiny", *engine, *AUDIT, "--temperatures", "0"]) == 0
        assert document_of(capsys)["checks"][0]["name"] == "greedy ngram k=2 = plain"
