"""Requests of clients that know other servers: what is ignored, what is refused, and how the client learns of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from starlette.responses import Response

from paceline.serve.app import create_app
from paceline.serve.config import ServerConfig
from paceline.serve.extra_fields import HEADER, UNSUPPORTED, add_header
from paceline.serve.schema import CompletionRequest
from tests.serve.running import CHAT, COMPLETIONS, NAME, RunningServer
from tests.serve.toy_engine import ReversingEngine

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(params=[False, True], ids=["lenient", "strict"])
def strict(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def engine() -> ReversingEngine:
    return ReversingEngine()


@pytest.fixture
def client(strict: bool, engine: ReversingEngine) -> Iterator[TestClient]:
    app = create_app(engine, ServerConfig((NAME,), strict=strict))
    with TestClient(app, base_url="http://127.0.0.1") as client:
        yield client


def lenient(test: Any) -> Any:
    return pytest.mark.parametrize("strict", [False], indirect=True, ids=["lenient"])(test)


def test_an_unknown_field_is_ignored_and_named_or_refused(client: TestClient, strict: bool) -> None:
    body = {"messages": [{**MESSAGES[0], "audio": None}], "max_token": 5, "store": True}
    for stream in (False, True):
        response = client.post(CHAT, json={**body, "stream": stream})
        if strict:
            assert response.status_code == 400 and "max_token" in response.json()["error"]["message"]
        else:
            assert response.status_code == 200 and response.headers[HEADER] == "max_token, messages.audio"


def test_a_request_without_extra_fields_has_no_such_header(client: TestClient) -> None:
    body = {"messages": MESSAGES, "tools": [], "tool_choice": "none", "modalities": ["text"], "user": "u"}
    response = client.post(CHAT, json=body)
    assert response.status_code == 200 and HEADER not in response.headers
    assert HEADER not in client.post(COMPLETIONS, json={"prompt": "abc", "suffix": None}).headers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "extra", "param"),
    [
        (COMPLETIONS, {"tools": [{"type": "function"}]}, "tools"),
        (COMPLETIONS, {"tool_choice": "required"}, "tool_choice"),
        (COMPLETIONS, {"reasoning_effort": "high"}, "reasoning_effort"),
        (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
        (CHAT, {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages.function_call"),
        (CHAT, {"audio": {"voice": "alloy"}}, "audio"),
        (CHAT, {"best_of": 2}, "best_of"),
        (COMPLETIONS, {"mirostat": 2}, "mirostat"),
        (COMPLETIONS, {"typical_p": 0.2}, "typical_p"),
        (COMPLETIONS, {"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_field_that_would_change_the_output_is_refused_by_name(
    client: TestClient, engine: ReversingEngine, path: str, extra: dict[str, Any], param: str
) -> None:
    body = {"messages": MESSAGES} if path == CHAT else {"prompt": "abc"}
    error = client.post(path, json={**body, **extra}).json()["error"]
    assert error["param"] == param and error["message"].startswith(f"{param} would change the output")
    assert not engine.requests


@pytest.mark.slow
@lenient
def test_such_a_field_is_ignored_where_it_asks_for_nothing(client: TestClient) -> None:
    for name, neutral in UNSUPPORTED.items():
        for value in neutral if name not in CompletionRequest.model_fields else ():  # some are fields of completions
            response = client.post(COMPLETIONS, json={"prompt": "abc", name: value})
            assert response.status_code == 200, f"{name}={value!r}: {response.text}"


@lenient
def test_the_log_names_a_field_once(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paceline.serve"):
        for _ in range(3):
            client.post(COMPLETIONS, json={"prompt": "abc", "cache_salt": "x", "request_tag": 1})
    fields = [record.__dict__["fields"]["field"] for record in caplog.records if "ignored" in record.getMessage()]
    assert fields == ["cache_salt", "request_tag"]


@pytest.mark.slow
@lenient
def test_names_that_a_client_invents_break_neither_the_header_nor_the_log(client: TestClient) -> None:
    names = ["new\r\nx-evil: 1", "ünï", "x" * 500, *(f"field{number}" for number in range(400))]
    response = client.post(COMPLETIONS, json={"prompt": "abc", **dict.fromkeys(names, 1)})
    assert response.status_code == 200 and "x-evil" not in response.headers
    assert response.headers[HEADER].startswith(f"new??x-evil??1, ?n?, {'x' * 64}, field0,")
    assert response.headers[HEADER].endswith(", ...") and len(response.headers[HEADER]) < 1200


def test_a_field_without_a_name_leaves_the_header_valid(tiny_server: RunningServer) -> None:
    response = tiny_server.http().post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 1, "x": 1, "": 1})
    assert response.status_code == 200 and response.headers[HEADER] == "x, ?"


def test_our_own_objects_have_no_unknown_fields(client: TestClient) -> None:
    body = {"prompt": "abc", "speculative": {"methdo": "ngram"}}
    assert client.post(COMPLETIONS, json=body).status_code == 400


# --- values that other servers take -----------------------------------------------------------------------------------


def test_loose_values_are_taken(client: TestClient, engine: ReversingEngine) -> None:
    assert client.post(COMPLETIONS, json={"prompt": "abc", "stop": "", "top_p": 0}).status_code == 200
    assert engine.requests[0].stop == () and 0 < engine.requests[0].sampling.top_p < 1e-6


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_after_an_echo_return_the_prompt(
    client: TestClient, engine: ReversingEngine, stream: bool
) -> None:
    body = {"prompt": ["abc", "de"], "echo": True, "max_tokens": 0, "stream": stream}
    response = client.post(COMPLETIONS, json=body)
    assert response.status_code == 200 and not engine.requests
    if not stream:
        choices = [(choice["text"], choice["finish_reason"]) for choice in response.json()["choices"]]
        assert choices == [("abc", "length"), ("de", "length")]
        assert response.json()["usage"]["completion_tokens"] == 0


def test_prompt_and_max_tokens_beyond_the_context_are_refused_with_openais_code(client: TestClient) -> None:
    response = client.post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 62})
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
    long = {"prompt": "x" * 200, "max_tokens": 60, "truncate_prompt_tokens": -1}
    assert client.post(COMPLETIONS, json=long).json()["usage"]["prompt_tokens"] == 4


# --- the openai package -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_conversation_of_the_openai_package_has_a_second_turn(tiny_server: RunningServer) -> None:
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    client = tiny_server.client()
    for question in ("and then?", "and after that?"):
        first = client.chat.completions.create(model=NAME, messages=messages, max_tokens=4, temperature=0)
        sent_back = first.choices[0].message.model_dump()
        assert sent_back["tool_calls"] is None and sent_back["audio"] is None, "the fields that were refused"
        messages += [sent_back, {"role": "user", "content": question}]
    raw = client.chat.completions.with_raw_response.create(model=NAME, messages=messages, max_tokens=4)
    assert "messages.audio" in raw.headers[HEADER] and raw.parse().choices[0].message.role == "assistant"


def test_a_field_without_a_name_is_shown_too() -> None:
    response = add_header(Response(), ["a", ""])
    assert response.headers[HEADER] == "a, ?", "a header may not end with a space"
