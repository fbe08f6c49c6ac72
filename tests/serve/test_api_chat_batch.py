"""Several conversations in one request."""

from __future__ import annotations

from typing import Any

import httpx

from tests.serve.running import CHAT, NAME, RunningServer

TEXTS = ("abc", "defdef", "gh")


def post(server: RunningServer, **fields: Any) -> httpx.Response:
    body = {"model": NAME, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **fields}
    with server.http() as client:
        return client.post(f"{CHAT}/batch", json=body)


def conversations(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": text}] for text in texts]


def test_every_conversation_is_answered_as_if_it_were_alone(tiny_server: RunningServer) -> None:
    document = post(tiny_server, messages=conversations(*TEXTS)).json()
    alone = [post(tiny_server, messages=conversations(text)).json() for text in TEXTS]
    assert [choice["index"] for choice in document["choices"]] == [0, 1, 2]
    assert [choice["message"] for choice in document["choices"]] == [
        single["choices"][0]["message"] for single in alone
    ]
    assert len({choice["message"]["content"] for choice in document["choices"]}) == 3
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert document["usage"][name] == sum(single["usage"][name] for single in alone)
    with tiny_server.http() as client:
        body = {"messages": conversations(TEXTS[0])[0], "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        single = client.post(CHAT, json=body).json()["choices"][0]["message"]
    assert single == document["choices"][0]["message"]


def test_a_batch_takes_the_fields_of_a_chat(tiny_server: RunningServer) -> None:
    fields = {"n": 2, "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    document = post(tiny_server, messages=conversations(*TEXTS), **fields).json()
    assert len(document["choices"]) == 6
    assert all(
        entry["token"].startswith("token_id:")
        for choice in document["choices"]
        for entry in choice["logprobs"]["content"]
    )


def test_what_a_batch_cannot_do_is_refused(tiny_server: RunningServer) -> None:
    for changes in ({"stream": True}, {"messages": []}, {"messages": [[]]}, {"n": 4}, {"messages": [[{"role": 1}]]}):
        response = post(tiny_server, **{"messages": conversations(*TEXTS), **changes})
        assert response.status_code == 400 and response.json()["error"]["message"], changes


def test_fields_of_every_conversation_are_checked(tiny_server: RunningServer) -> None:
    first, second = conversations("a", "b")
    response = post(tiny_server, messages=[first, [{**second[0], "unknown": 1}]])
    assert response.headers["x-paceline-ignored"] == "messages.unknown"
    response = post(tiny_server, messages=[first, [{**second[0], "audio": {"id": "a"}}]])
    assert response.status_code == 400 and response.json()["error"]["param"] == "messages.audio"
