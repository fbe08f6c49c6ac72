"""tune over several engines: what it measures, advises, prints and writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.bench.candidates import DecodeSetting
from paceline.bench.engine_tune import EngineRate, advise_engine, k_by_load, loads_up_to
from paceline.bench.outcome import Outcome
from paceline.cli import main
from paceline.config import EngineConfig
from paceline.engines import registry
from paceline.engines.registry import EngineSpec
from paceline.tuned import read_profile
from tests.support.foreign_engine import clock, register_foreign

SMALL = ["--limit", "2", "--max-new-tokens", "8", "--repeats", "1", "--device", "cpu"]


@pytest.fixture(autouse=True)
def _foreign_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with register_foreign():
        yield


def rate(
    engine: str, k: int, *by_load: float, outcome: Outcome = Outcome.LOSSLESS, tokens_per_step: float = 3.0
) -> EngineRate:
    """Of ngram, or of plain decoding where k is 0, at 1, 4 and 8 sequences."""
    setting = DecodeSetting("ngram" if k else "none", k)
    rates = dict(zip((1, 4, 8), by_load))
    config = EngineConfig.create("m")
    return EngineRate(engine, "m", "cpu", setting, by_load[-1], tokens_per_step, outcome, config, rates)


def test_the_fastest_engine_and_its_lead_over_the_next_are_named() -> None:
    rates = [rate("slow", 0, 10.0), rate("slow", 3, 20.0), rate("fast", 0, 30.0), rate("fast", 3, 42.0)]
    advice = advise_engine(rates)
    assert advice.sentence == (
        "fast with ngram k=3 is fastest on this machine: 42.0 tokens/s, 2.10x the next (slow with ngram k=3, "
        "20.0 tokens/s) and 1.40x its own plain decoding."
    )
    assert (advice.best.name, advice.next and advice.next.name) == ("fast ngram k=3", "slow ngram k=3")


def test_neither_noise_nor_another_output_is_advised() -> None:
    rates = [rate("a", 0, 100.0), rate("a", 3, 102.0), rate("a", 8, 500.0, outcome=Outcome.DIFFERENT)]
    assert advise_engine(rates).sentence == "a without speculation is fastest on this machine: 100.0 tokens/s."


def test_a_gain_above_the_tokens_per_step_is_noise_at_every_load() -> None:
    rates = [rate("a", 0, 10.0, 30.0, 80.0), rate("a", 3, 15.0, 45.0, 120.0, tokens_per_step=1.0)]
    assert advise_engine(rates).best.name == "a plain"
    assert k_by_load(rates[1], rates) == [[1, 8, 0]]


def test_k_by_load_is_the_fastest_of_one_method_at_each_load_and_0_where_plain_decoding_is() -> None:
    rates = [
        rate("a", 0, 10.0, 30.0, 80.0),
        rate("a", 3, 15.0, 36.0, 70.0),
        rate("a", 8, 20.0, 31.0, 60.0),
        rate("b", 3, 99.0, 99.0, 99.0),
    ]
    assert k_by_load(rates[1], rates) == [[1, 1, 8], [2, 4, 3], [5, 8, 0]]
    alike = [rate("a", 0, 1.0, 1.0, 1.0), rate("a", 3, 2.0, 2.0, 2.0)]
    assert k_by_load(alike[1], alike) == [[1, 8, 3]]
    assert loads_up_to(8) == [1, 4, 8] and loads_up_to(1) == [1]


def tune(*arguments: str) -> int:
    return main(["tune", *SMALL, *arguments])


@pytest.mark.slow
def test_tune_names_the_fastest_engine_and_the_lines_that_start_it(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock `foreign` takes minutes for each sequence, so the other engine wins on any machine."""
    monkeypatch.setattr("paceline.bench.engine_pool.time", SimpleNamespace(perf_counter=clock))
    engines = ["--engines", "foreign,roaming", "--engine-option", "delay=600", "--methods", "ngram"]
    assert tune(str(tiny_folder), *engines, "--json") == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["engine"] == "roaming" and document["sentence"].startswith("roaming with")
    assert {(item["engine"], item["method"]) for item in document["rates"]} == {
        ("foreign", "none"), ("foreign", "ngram"), ("roaming", "none"), ("roaming", "ngram"),
    }  # fmt: skip
    assert f"paceline serve {tiny_folder} --engine roaming --device cpu" in document["command"]
    assert document["server_command"] is None and "delay" not in document["command"]
    assert read_profile(Path("paceline.toml")).engine == "roaming"
    from paceline.cli import serve
    from paceline.cli.flags import CommandParser

    parser = CommandParser()
    serve.configure(parser)
    parser.parse_args(document["command"].split()[2:])


@pytest.mark.slow
def test_an_engine_configured_at_start_gets_the_line_of_its_own_server_with_k_by_load(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which k is fastest is up to the clock; that each load has one, and in which form, is not."""
    from paceline.bench import engine_tune

    monkeypatch.setattr(engine_tune, "LEAST_GAIN", 0.0)  # speculation is advised whatever it gains, …
    monkeypatch.setattr(engine_tune, "exceeds_tokens_per_step", lambda speedup, tokens_per_step: False)  # … or seems to
    assert tune(str(tiny_folder), "--engines", "foreign", "--methods", "ngram", "--max-num-seqs", "2") == 0
    printed = capsys.readouterr().out
    lines = [line.strip() for line in printed.splitlines()]
    [server] = [line for line in lines if line.startswith("foreign-server")]
    assert "--method ngram" in server
    schedule = json.loads(server.partition("--schedule ")[2])
    assert schedule[0][0] == 1 and schedule[-1][1] == 2 and {entry[2] for entry in schedule} <= {0, 3, 8}
    assert lines[-1].startswith("foreign with ngram k=")


@pytest.mark.slow
def test_by_default_every_engine_that_can_run_the_model_takes_part(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    registry.register(EngineSpec("missing", "", registry.spec("foreign").open, packages=("no_such_package",)))
    registry.register(EngineSpec("picky", "", registry.spec("foreign").open, model_for=lambda name: None))
    try:
        assert tune(str(tiny_folder), "--methods", "ngram", "--json") == 0
        document = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert {"local", "foreign", "roaming"} == {item["engine"] for item in document["rates"]}
        assert tune(str(tiny_folder), "--engines", "picky") == 2
        assert "--engines picky=MODEL" in capsys.readouterr().err
    finally:
        for name in ("missing", "picky"):
            registry._REGISTERED.pop(name)


def test_an_engine_option_that_no_engine_has_is_refused(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tune(str(tiny_folder), "--engines", "foreign", "--engine-option", "speed=11") == 2
    assert "none of these engines has an option 'speed'; they have broken, delay" in capsys.readouterr().err
