"""/tokenize, /detokenize, /apply-template and /tokenizer_info, as clients of vLLM and llama.cpp call them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.serve.running import NAME, RunningServer
from tests.support.tiny import byte_tokenizer

TEXT = "to be, né 媽"


def post(server: RunningServer, path: str, **fields: Any) -> httpx.Response:
    with server.http() as client:
        return client.post(path, json=fields)


def test_a_prompt_is_tokenized_and_back(tiny_server: RunningServer) -> None:
    document = post(tiny_server, "/tokenize", model=NAME, prompt=TEXT).json()
    expected = byte_tokenizer()(TEXT).input_ids
    assert document == {"count": len(expected), "max_model_len": 512, "tokens": expected, "token_strs": None}
    assert post(tiny_server, "/detokenize", model=NAME, tokens=expected).json() == {"prompt": TEXT}
    assert post(tiny_server, "/detokenize", tokens=expected).json() == {"prompt": TEXT, "content": TEXT}


def test_token_strings_are_the_vocabularys(tiny_server: RunningServer) -> None:
    document = post(tiny_server, "/tokenize", prompt="a é", return_token_strs=True).json()
    assert document["token_strs"] == ["a", "Ġ", "Ã", "©"]


@pytest.mark.slow
def test_messages_go_through_the_template(tiny_server: RunningServer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokens = post(tiny_server, "/tokenize", messages=messages).json()["tokens"]
    text = "<s>user: hi</s><s>assistant: "
    assert post(tiny_server, "/detokenize", tokens=tokens).json()["prompt"] == text
    assert post(tiny_server, "/apply-template", messages=messages).json() == {"prompt": text}


@pytest.mark.model
@pytest.mark.slow
def test_special_tokens_of_the_default_model(default_server: RunningServer) -> None:
    info = default_server.http().get("/tokenizer_info").json()
    assert "<|im_start|>" in info["chat_template"] and info["eos_token"] == "<|im_end|>"
    prompt = post(default_server, "/apply-template", messages=[{"role": "user", "content": "hi"}]).json()["prompt"]
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.slow
def test_content_is_read_as_llama_cpp_does(tiny_server: RunningServer) -> None:
    tokens = byte_tokenizer()(TEXT).input_ids
    assert post(tiny_server, "/tokenize", content=TEXT).json() == {"tokens": tokens}
    pieces = post(tiny_server, "/tokenize", content="aé", with_pieces=True).json()["tokens"]
    assert [piece["piece"] for piece in pieces] == ["a", [0xC3], [0xA9]]
    assert post(tiny_server, "/tokenize", content="").json() == {"tokens": []}


def test_the_tokenizer_is_described(tiny_server: RunningServer) -> None:
    info = tiny_server.http().get("/tokenizer_info").json()
    assert info["bos_token"] == "<s>" and "message['role']" in info["chat_template"] and info["tokenizer_class"]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "content": "a"}),
        ("/tokenize", {"prompt": "\ud800"}),
        ("/tokenize", {"prompt": "a", "model": "nothing"}),
        ("/tokenize", {"messages": []}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [100000]}),
        ("/detokenize", {"tokens": "abc"}),
        ("/apply-template", {}),
    ],
)
def test_what_is_wrong_is_refused(tiny_server: RunningServer, path: str, fields: dict[str, Any]) -> None:
    body = json.dumps(fields).encode()
    response = tiny_server.http().post(path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code in (400, 404) and response.json()["error"]["message"]
