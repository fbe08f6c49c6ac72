"""bench, audit, tune and generate over the engines of others, as a user types them. Skipped where none is installed."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from tests.support.engines import ascii_gguf
from tests.support.tiny import write_tiny_model

pytestmark = pytest.mark.slow
SMALL = ["--limit", "2", "--max-new-tokens", "8", "--repeats", "1", "--device", "cpu", "--json"]
ONE_THREAD = ["--engine-option", "threads=1"]
AUDIT = ["--quick", "--draws", "200", "--seconds", "6000", "--distance", "0.5", "--device", "cpu", "--json"]


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("xllamacpp")
    return ascii_gguf(tmp_path_factory.mktemp("gguf"))


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACELINE_PROFILE", raising=False)


def document_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return document


def test_llama_cpp_is_benched_with_speculation_and_without(gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", str(gguf), *SMALL, "--engine", "llama_cpp", *ONE_THREAD, "--methods", "ngram", "-k", "3"]
    assert main([*command, "--report", "none"]) == 0
    plain, drafted = document_of(capsys)["settings"]
    assert (plain["name"], drafted["name"], drafted["lossless"]) == ("plain", "ngram k=3", True)
    [run] = json.loads(Path("results.json").read_text())["runs"]
    is_noise = run["settings"][1]["noise"] is not None  # of a tiny model on a busy machine: then there is no speed-up
    assert plain["tokens_per_second"] > 0 and (drafted["speedup"] is None) == is_noise
    assert run["engine"] == "llama_cpp" and run["versions"]["xllamacpp"] != "not installed"


def test_llama_cpp_is_audited(gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A false alarm has probability 0.001. A tiny model as its own draft model drafts at every step."""
    command = ["audit", str(gguf), "--engine", "llama_cpp", *ONE_THREAD, "--methods", "draft_model", *AUDIT]
    assert main([*command, "--draft-model", str(gguf), "--temperatures", "0.5"]) == 0
    document = document_of(capsys)
    assert document["outcome"] == "lossless"
    assert [check["kind"] for check in document["checks"]] == ["greedy", "sampled", "sampled"]


def test_a_gguf_file_in_llama_cpp_is_close_to_its_original(gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The weights are whole, so only the arithmetic of the two engines differs; keys and values are in 16 bits."""
    command = ["bench", str(gguf), *SMALL, "--engine", "llama_cpp", *ONE_THREAD, "--report", "none"]
    assert main([*command, "--against", str(gguf), "--text-tokens", "40"]) == 0
    distance = document_of(capsys)["against"]["distance"]
    assert distance["is_bound"] and distance["positions"] == 39
    assert distance["divergence"]["mean"] < 0.01 and distance["same_best"]["mean"] > 0.9


def test_tune_compares_our_own_engine_with_llama_cpp(gguf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["tune", str(gguf), *SMALL, "--engines", "local,llama_cpp", *ONE_THREAD, "--methods", "ngram"]
    assert main(command) == 0
    document = document_of(capsys)
    assert {rate["engine"] for rate in document["rates"]} == {"local", "llama_cpp"}
    plain = [rate["tokens_per_second"] for rate in document["rates"] if not rate["num_draft_tokens"]]
    assert len(plain) == 2 and document["best"]["tokens_per_second"] >= max(plain), "a gain may be noise, these are not"
    words = shlex.split(document["command"])
    assert words[:3] == ["paceline", "serve", str(gguf)]
    if document["engine"] == "llama_cpp":
        assert document["server_command"].startswith("llama-server -m ")
    from paceline.cli import serve
    from paceline.cli.flags import CommandParser

    parser = CommandParser()
    serve.configure(parser)
    parser.parse_args(words[2:])


# --- vLLM -------------------------------------------------------------------------------------------------------------

VLLM = ["--engine", "vllm", "--engine-option", "enforce_eager=true", "--engine-option", "kv_cache_gib=0.25"]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm: make test-engines")
def test_vllm_is_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A false alarm has probability 0.001. The model drafts for itself, so that every step verifies draft tokens."""
    folder = str(write_tiny_model(tmp_path / "wide", hidden_size=128))
    command = ["audit", folder, *VLLM, "--methods", "draft_model", "--draft-model", folder, *AUDIT]
    assert main([*command, "--temperatures", "0.5"]) == 0
    document = document_of(capsys)
    assert document["outcome"] == "lossless"
    assert [check["kind"] for check in document["checks"]] == ["greedy", "sampled", "sampled"]
