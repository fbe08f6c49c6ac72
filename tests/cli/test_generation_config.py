"""The model's own sampling defaults, through the commands and the library."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from paceline import SpeculativeDecoder
from paceline.core.sampling import SamplingParams
from paceline.engines.local.async_engine import AsyncEngine
from tests.support.tiny import write_tiny_model

ASKED = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
WORDS = "temperature 0.7, top_k 20, top_p 0.8, repetition_penalty 1.1"


@pytest.fixture(scope="module")
def sampled_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose authors want it sampled, and one setting that paceline does not have."""
    folder = write_tiny_model(tmp_path_factory.mktemp("sampled") / "model")
    asked = {**ASKED, "no_repeat_ngram_size": 3, "eos_token_id": 257}
    (folder / "generation_config.json").write_text(json.dumps(asked))
    return str(folder)


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The settings of every `stream` call."""
    calls: list[dict[str, Any]] = []
    stream = SpeculativeDecoder.stream

    def recorded(decoder: SpeculativeDecoder, prompt: Any, **settings: Any) -> Any:
        calls.append(settings)
        return stream(decoder, prompt, **settings)

    monkeypatch.setattr(SpeculativeDecoder, "stream", recorded)
    return calls


def test_chat_follows_the_model_and_says_so(
    run_command: Any, sampled_folder: str, streamed: list[dict[str, Any]]
) -> None:
    command = ("chat", sampled_folder, "--method", "none", "--max-new-tokens", "4")
    result = run_command(*command, stdin="hi\n")
    assert result.status == 0 and f"sampling defaults of the model: {WORDS}" in result.err
    assert "no_repeat_ngram_size 3 (not available)" in result.err
    assert {name: streamed[0][name] for name in ASKED if name != "do_sample"} == {
        name: value for name, value in ASKED.items() if name != "do_sample"
    }
    run_command(*command, "--temperature", "0.2", stdin="hi\n")
    assert (streamed[1]["temperature"], streamed[1]["top_p"]) == (0.2, 0.8), "a flag overrules one default"


def test_chat_can_ignore_the_model_and_says_so(
    run_command: Any, sampled_folder: str, streamed: list[dict[str, Any]]
) -> None:
    command = ("chat", sampled_folder, "--method", "none", "--max-new-tokens", "4", "--generation-config", "none")
    result = run_command(*command, stdin="hi\n")
    assert streamed[0]["temperature"] == 0 and "top_p" not in streamed[0]
    assert f"greedy; the model's generation_config.json asks for {WORDS}" in result.err


@pytest.mark.slow
def test_generate_is_greedy_and_says_what_the_model_asks_for(
    run_command: Any, sampled_folder: str, streamed: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    command = ("generate", "-m", sampled_folder, "abc", "--max-new-tokens", "4")
    result = run_command(*command)
    assert result.err.count(WORDS) == 1 and "--generation-config model" in result.err
    assert streamed[0]["temperature"] == 0 and not caplog.records, "the library does not say it again"
    assert WORDS not in run_command(*command, "--temperature", "0").err
    followed = run_command(*command, "--generation-config", "model")
    assert streamed[2]["temperature"] == 0.7 and "no_repeat_ngram_size 3 (not available)" in followed.err


@pytest.mark.slow
def test_the_library_is_greedy_and_says_it_once(sampled_folder: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paceline"), SpeculativeDecoder(sampled_folder) as decoder:
        decoder.generate("abc", max_new_tokens=2, temperature=0.0)
        assert not caplog.records, "a call that says how to sample needs no advice"
        greedy = [decoder.generate("abc", max_new_tokens=8).token_ids for _ in range(2)]
        assert len(caplog.records) == 1 and WORDS in caplog.text and "greedy" in caplog.text
        assert greedy[0] == greedy[1] == decoder.generate("abc", max_new_tokens=8, do_sample=False).token_ids
        settings = decoder.generation_defaults.settings
        assert settings["top_k"] == 20 and decoder.generate("abc", max_new_tokens=2, **settings).token_ids


def test_a_model_without_defaults_is_not_talked_about(run_command: Any, caplog: pytest.LogCaptureFixture) -> None:
    for command in (("generate", "-m", "TINY", "abc"), ("chat", "TINY", "--method", "none")):
        result = run_command(*command, "--max-new-tokens", "2", stdin="hi\n")
        assert result.status == 0 and "generation" not in result.err and "defaults" not in result.err
    assert not caplog.records


def test_a_setting_that_is_not_available_is_named_once(
    run_command: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tiny_model(tmp_path / "model")
    (folder / "generation_config.json").write_text('{"num_beams": 4, "eos_token_id": 257}')
    for command in (("chat", str(folder), "--method", "none"), ("generate", "-m", str(folder), "abc")):
        result = run_command(*command, "--max-new-tokens", "2", stdin="hi\n")
        assert result.status == 0 and result.err.count("num_beams 4 (not available)") == 1
    assert not caplog.records


def test_a_damaged_file_is_an_error_in_one_line(run_command: Any, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    (folder / "generation_config.json").write_text('{"top_p": 7, "eos_token_id": 257}')
    result = run_command("chat", str(folder), "--method", "none", stdin="hi\n")
    assert result.status == 2 and "generation_config.json" in result.err and "Traceback" not in result.err


# --- the server -------------------------------------------------------------------------------------------------------


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, run_command: Any) -> Any:
    """served(folder, *flags): what `paceline serve` prints, the defaults it lists, the sampling of two requests."""

    def run(folder: str, *flags: str) -> dict[str, Any]:
        document: dict[str, Any] = {}

        def exchange(app: FastAPI, *_: Any) -> None:
            requests: list[Any] = []
            with TestClient(app, base_url="http://127.0.0.1") as client:
                generate = AsyncEngine.generate
                monkeypatch.setattr(
                    AsyncEngine, "generate", lambda *call: requests.append(call[1]) or generate(*call)
                )
                document["defaults"] = client.get("/v1/models").json()["data"][0]["x_paceline"]["sampling_defaults"]
                for own in ({}, {"temperature": 0, "top_p": 1}):
                    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, **own}
                    assert client.post("/v1/chat/completions", json=body).status_code == 200
            monkeypatch.setattr(AsyncEngine, "generate", generate)
            document["sampling"] = [request.sampling for request in requests]

        monkeypatch.setattr("paceline.serve.run.run", exchange)
        result = run_command("serve", folder, "--method", "none", "--port", "0", *flags)
        assert result.status == 0, result.err
        return {**document, "printed": result.err}

    return run


@pytest.mark.slow
def test_the_server_follows_the_model_where_a_request_leaves_it_open(served: Any, sampled_folder: str) -> None:
    document = served(sampled_folder)
    assert f"sampling defaults of the model: {WORDS}" in document["printed"] and "OpenAI's" in document["printed"]
    assert document["defaults"] == {name: value for name, value in ASKED.items() if name != "do_sample"}
    left_open, chosen = document["sampling"]
    assert left_open == SamplingParams(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.1)
    assert (chosen.temperature, chosen.top_p, chosen.repetition_penalty) == (0, 1, 1.1)


@pytest.mark.slow
def test_the_server_can_ignore_the_model(served: Any, sampled_folder: str) -> None:
    document = served(sampled_folder, "--generation-config", "none")
    assert document["defaults"] == {} and document["sampling"][0] == SamplingParams(temperature=1.0)
