"""llama.cpp's routes, and text between a prefix and a suffix."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from paceline.errors import PromptError
from paceline.hub.tokenizer import Tokenizer
from paceline.serve.config import ServerConfig
from paceline.serve.fill_in_middle import FillInMiddle, OtherFile
from paceline.serve.vocabulary import vocabulary
from tests.serve.running import COMPLETIONS, NAME, RunningServer, serving_model
from tests.support.tiny import byte_tokenizer, tiny_llama

MIDDLE = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>"]
GREEDY = {"temperature": 0, "ignore_eos": True}


def coder_tokenizer() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": MIDDLE})
    return tokenizer


@pytest.fixture(scope="module")
def coder(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    with serving_model(tiny_llama(vocab_size=263), coder_tokenizer(), ServerConfig((NAME,))) as server:
        yield server


def post(server: RunningServer, path: str, **fields: Any) -> httpx.Response:
    with server.http() as client:
        return client.post(path, json=fields)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line]


# --- /completion ------------------------------------------------------------------------------------------------------


def test_a_completion_has_content_counts_and_timings(tiny_server: RunningServer) -> None:
    document = post(tiny_server, "/completion", prompt="abc", n_predict=8, **GREEDY).json()
    expected = post(tiny_server, COMPLETIONS, prompt="abc", max_tokens=8, **GREEDY).json()["choices"][0]["text"]
    assert document["content"] == expected and document["stop_type"] == "limit" and document["stop"]
    assert (document["tokens_predicted"], document["tokens_evaluated"]) == (8, 3)
    assert document["timings"]["prompt_n"] == 3 and document["timings"]["predicted_n"] == 8
    assert document["generation_settings"]["n_predict"] == 8 and document["truncated"] is False


def test_a_stream_adds_up_to_the_whole(tiny_server: RunningServer) -> None:
    whole = post(tiny_server, "/completion", prompt="abc", n_predict=8, **GREEDY).json()
    *parts, last = events(post(tiny_server, "/completion", prompt="abc", n_predict=8, stream=True, **GREEDY))
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert sum(len(part["tokens"]) for part in parts) == 8
    assert not any(part["stop"] for part in parts) and last["stop"] and last["timings"]["predicted_n"] == 8


def test_a_stop_string_is_named(tiny_server: RunningServer) -> None:
    text = post(tiny_server, "/completion", prompt="abc", n_predict=20, **GREEDY).json()["content"]
    stop = next(character for character in text[3:] if character.isascii())
    document = post(tiny_server, "/completion", prompt="abc", n_predict=20, stop=[stop], **GREEDY).json()
    assert (document["stop_type"], document["stopping_word"]) == ("word", stop)


def test_prompts_mix_tokens_and_strings(tiny_server: RunningServer) -> None:
    tokens = byte_tokenizer()("abc").input_ids
    whole = post(tiny_server, "/completion", prompt="abc", n_predict=4, **GREEDY).json()["content"]
    several = post(tiny_server, "/completion", prompt=["abc", tokens], n_predict=4, **GREEDY).json()
    assert [document["content"] for document in several] == [whole, whole]
    mixed = post(tiny_server, "/completion", prompt=[tokens[0], "bc"], n_predict=4, **GREEDY).json()
    assert mixed["content"] == whole and mixed["tokens_evaluated"] == 3


def test_response_fields_select(tiny_server: RunningServer) -> None:
    fields = ["content", "generation_settings/n_predict"]
    document = post(tiny_server, "/completion", prompt="a", n_predict=3, response_fields=fields).json()
    assert set(document) == set(fields) and document["generation_settings/n_predict"] == 3


@pytest.mark.parametrize("prompt", [[], [1, {}], [None], [[1, None]], {}, 7, "", [True]])
def test_a_malformed_prompt_is_refused(tiny_server: RunningServer, prompt: object) -> None:
    assert post(tiny_server, "/completion", prompt=prompt, n_predict=2).status_code == 400


# --- fill in the middle -----------------------------------------------------------------------------------------------


def test_infill_writes_between_prefix_and_suffix(coder: RunningServer) -> None:
    prompt = coder_tokenizer()("<|fim_prefix|>def f():<|fim_suffix|>\nf()<|fim_middle|>").input_ids
    expected = post(coder, COMPLETIONS, prompt=prompt, max_tokens=6, **GREEDY).json()["choices"][0]["text"]
    document = post(
        coder, "/infill", input_prefix="def ", prompt="f():", input_suffix="\nf()", n_predict=6, **GREEDY
    ).json()
    assert document["content"] == expected and document["tokens_evaluated"] == len(prompt)
    body = {"prompt": "def f():", "suffix": "\nf()", "max_tokens": 6, **GREEDY}
    assert post(coder, COMPLETIONS, **body).json()["choices"][0]["text"] == expected
    ollama = {"model": NAME, "prompt": "def f():", "suffix": "\nf()", "stream": False}
    options = {"num_predict": 6, "temperature": 0}
    response = post(coder, "/api/generate", **ollama, options=options).json()["response"]
    assert expected.startswith(response), "without ignore_eos it may end earlier"


def test_other_files_come_before_the_gap() -> None:
    tokenizer = coder_tokenizer()
    middle = FillInMiddle(vocabulary(Tokenizer(tokenizer)))
    ids = middle.prompt("a", "b", (OtherFile("x.py", "text"),))
    expected = "<|file_sep|>x.py\ntext\n<|file_sep|><|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
    assert ids == tokenizer(expected).input_ids


def test_a_model_without_the_tokens_says_so(tiny_server: RunningServer) -> None:
    for path, fields in (
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}),
    ):
        response = post(tiny_server, path, **fields)
        assert response.status_code == 400 and "fill-in-the-middle" in response.json()["error"]["message"]
    with pytest.raises(PromptError, match="Coder"):
        FillInMiddle(vocabulary(Tokenizer(byte_tokenizer()))).prompt("a", "b")
    assert post(tiny_server, COMPLETIONS, prompt="a", suffix=None, max_tokens=1).status_code == 200


@pytest.mark.parametrize("extra", [{}, {"filename": "ok"}, {"filename": 123, "text": "abc"}])
def test_a_malformed_file_is_refused(coder: RunningServer, extra: dict[str, Any]) -> None:
    assert post(coder, "/infill", input_prefix="a", input_suffix="b", input_extra=[extra]).status_code == 400


# --- /props, /slots ---------------------------------------------------------------------------------------------------


def test_the_server_is_described(tiny_server: RunningServer) -> None:
    props = tiny_server.http().get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 512 and props["total_slots"] == 16
    assert props["model_alias"] == NAME and props["eos_token"] == "</s>" and "message" in props["chat_template"]
    entries = tiny_server.http().get("/slots").json()
    assert len(entries) == 16 and not any(entry["is_processing"] for entry in entries)
