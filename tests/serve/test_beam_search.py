"""The likeliest continuations, through HTTP against a tiny model whose distributions are computed beside it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import torch

from tests.serve.running import CHAT, COMPLETIONS, NAME, RunningServer
from tests.support.tiny import byte_tokenizer, tiny_llama

EOS = 257
PROMPT = byte_tokenizer()("abcab").input_ids


def post(server: RunningServer, path: str = COMPLETIONS, **fields: Any) -> httpx.Response:
    body = {"model": NAME, "max_tokens": 3, "use_beam_search": True, **fields}
    with server.http() as client:
        return client.post(path, json=body)


def likeliest(prompt: list[int], width: int, num_tokens: int) -> list[tuple[int, ...]]:
    """Beam search in its plainest form: every beam is read from its start, and no token ends it."""
    model = tiny_llama()
    beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(num_tokens):
        grown: list[tuple[tuple[int, ...], float]] = []
        for tokens, score in beams:
            with torch.inference_mode():
                row = torch.log_softmax(model(torch.tensor([[*prompt, *tokens]])).logits[0, -1].float(), dim=-1)
            grown += [((*tokens, token), score + float(row[token])) for token in row.topk(2 * width).indices.tolist()]
        beams = sorted(grown, key=lambda beam: -beam[1])[:width]
    return [tokens for tokens, _ in beams]


@pytest.mark.parametrize("width", [1, 3])
def test_the_beams_are_the_likeliest_continuations(tiny_server: RunningServer, width: int) -> None:
    fields = {"prompt": PROMPT, "n": width, "ignore_eos": True, "return_token_ids": True}
    document = post(tiny_server, **fields).json()
    tokens = [tuple(choice["token_ids"]) for choice in document["choices"]]
    assert tokens == likeliest(PROMPT, width, 3)
    assert document["usage"]["completion_tokens"] == 3 * width
    assert [choice["finish_reason"] for choice in document["choices"]] == ["length"] * width


@pytest.mark.slow
def test_every_prompt_has_its_own_beams(tiny_server: RunningServer) -> None:
    fields = {"n": 2, "ignore_eos": True, "return_token_ids": True}
    choices = post(tiny_server, prompt=["abc", "abc", "xyz"], **fields).json()["choices"]
    tokens = [choice["token_ids"] for choice in choices]
    assert len(tokens) == 6 and tokens[:2] == tokens[2:4] != tokens[4:] and tokens[0] != tokens[1]


def test_an_end_token_ends_a_beam(tiny_server: RunningServer) -> None:
    fields = {"prompt": PROMPT, "n": 2, "logit_bias": {str(EOS): 100}, "return_token_ids": True}
    first = post(tiny_server, **fields).json()["choices"][0]
    assert (first["token_ids"], first["text"], first["finish_reason"]) == ([EOS], "", "stop")


def test_a_chat_has_beams_too(tiny_server: RunningServer) -> None:
    messages = [{"role": "user", "content": "abc"}]
    choices = post(tiny_server, CHAT, messages=messages, n=2, ignore_eos=True, return_token_ids=True).json()["choices"]
    assert choices[0]["token_ids"] != choices[1]["token_ids"] and choices[0]["message"]["role"] == "assistant"


@pytest.mark.parametrize(
    "fields", [{"stream": True}, {"logprobs": 1}, {"stop": "a"}, {"min_tokens": 1}, {"guided_regex": "a"}, {"n": 17}]
)
def test_what_beams_do_not_go_with_is_refused(tiny_server: RunningServer, fields: dict[str, Any]) -> None:
    response = post(tiny_server, prompt="a", **fields)
    assert response.status_code == 400, response.text
