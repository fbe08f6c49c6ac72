"""Every malformed request gets a 4xx in OpenAI's shape or a clean close, and the next request is served."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from paceline.errors import OutOfMemory
from tests.serve.running import CHAT, COMPLETIONS, NAME, RunningServer, failing_pass, slowed

MESSAGES = '"messages": [{"role": "user", "content": "hi"}]'
JSON = {"Content-Type": "application/json"}


@pytest.fixture(autouse=True)
def next_request_is_served(tiny_server: RunningServer) -> Iterator[None]:
    yield
    body = {"prompt": "abc", "max_tokens": 2, "ignore_eos": True}  # the first token can be an end token
    response = tiny_server.http().post(COMPLETIONS, json=body)
    assert response.status_code == 200 and response.json()["usage"]["completion_tokens"] == 2
    tiny_server.wait_until_idle()


def error_message(response: httpx.Response) -> str:
    """The message of an error in OpenAI's shape."""
    assert 400 <= response.status_code < 500, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return str(error["message"])


BODIES = {
    "empty": b"",
    "truncated": b'{"messages": [',
    "not an object": b"[1, 2]",
    "a number": b"7",
    "NaN": f'{{{MESSAGES}, "temperature": NaN}}'.encode(),
    "Infinity": f'{{{MESSAGES}, "top_p": -Infinity}}'.encode(),
    "1e999": f'{{{MESSAGES}, "temperature": 1e999}}'.encode(),
    "negative": f'{{{MESSAGES}, "max_tokens": -1}}'.encode(),
    "zero": f'{{{MESSAGES}, "n": 0}}'.encode(),
    "huge": f'{{{MESSAGES}, "max_tokens": {10**40}}}'.encode(),
    "a number of 5,000 digits": f'{{{MESSAGES}, "seed": {"9" * 5000}}}'.encode(),
    "a string for a number": f'{{{MESSAGES}, "max_tokens": "5"}}'.encode(),
    "a number for a flag": f'{{{MESSAGES}, "stream": 1}}'.encode(),
    "a role that is no string": b'{"messages": [{"role": 5, "content": "hi"}]}',
    "no message": b'{"messages": []}',
    "lone surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "surrogate as model": f'{{{MESSAGES}, "model": "\\udfff"}}'.encode(),
    "surrogate as a field": f'{{{MESSAGES}, "\\udfff": 1}}'.encode(),
    "surrogate stop": f'{{{MESSAGES}, "stop": "\\ud83d"}}'.encode(),
    "not UTF-8": b'{"messages": "\xff\xfe"}',
    "deep": b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "rather deep": f'{{{MESSAGES}, "metadata": {"[" * 80 + "]" * 80}}}'.encode(),
    "too many stops": f'{{{MESSAGES}, "stop": {json.dumps(["x"] * 99)}}}'.encode(),
    "too many choices": f'{{{MESSAGES}, "n": 100}}'.encode(),
    "too many logprobs": f'{{{MESSAGES}, "logprobs": true, "top_logprobs": 1000}}'.encode(),
    "bias of no token": f'{{{MESSAGES}, "logit_bias": {{"999999999": 1}}}}'.encode(),
    "bias of a string": f'{{{MESSAGES}, "logit_bias": {{"cat": 1}}}}'.encode(),
    "bias too large": f'{{{MESSAGES}, "logit_bias": {{"5": 1e30}}}}'.encode(),
    "unknown method": f'{{{MESSAGES}, "speculative": {{"method": "magic"}}}}'.encode(),
    "k too large": f'{{{MESSAGES}, "speculative": {{"num_draft_tokens": 9999}}}}'.encode(),
    "impossible schema": (
        f'{{{MESSAGES}, "response_format": {{"type": "json_schema", "json_schema": '
        '{"name": "x", "schema": {"type": "nonsense"}}}}'
    ).encode(),
    "schema from elsewhere": (
        f'{{{MESSAGES}, "response_format": {{"type": "json_schema", "json_schema": '
        '{"name": "x", "schema": {"$ref": "http://example.org/x"}}}}'
    ).encode(),
    "usage without a stream": f'{{{MESSAGES}, "stream_options": {{"include_usage": true}}}}'.encode(),
    "prompt too long": json.dumps({"messages": [{"role": "user", "content": "long " * 500}]}).encode(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BODIES)
def test_a_malformed_body_is_refused(tiny_server: RunningServer, name: str) -> None:
    error_message(tiny_server.http().post(CHAT, content=BODIES[name], headers=JSON))


TOOL = {"type": "function", "name": "f", "parameters": {}}
MESSAGE = {"max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
CHANGE = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": ["x"]}}
OTHER_BODIES: dict[str, tuple[str, Any]] = {
    "an item whose type is a number": ("/v1/responses", {"input": [{"type": 5, "role": "user", "content": "a"}]}),
    "allowed tools that are a number": (
        "/v1/responses",
        {"input": "a", "tools": [TOOL], "tool_choice": {"type": "allowed_tools", "tools": 5}},
    ),
    "a tool choice whose type is a list": ("/v1/messages", {**MESSAGE, "tool_choice": {"type": ["x"]}}),
    "a tool whose name is a list": (
        "/v1/messages",
        {**MESSAGE, "messages": [*MESSAGE["messages"], {"role": "system", "content": [CHANGE]}]},  # type: ignore[misc]
    ),
    "a length that is a string": ("/completion", {"prompt": "a", "max_tokens": "abc"}),
    "a bias of a token that is too large": ("/completion", {"prompt": "a", "logit_bias": [[10**400, 1]]}),
}


@pytest.mark.parametrize("name", OTHER_BODIES)
def test_a_malformed_body_of_another_api_is_refused(tiny_server: RunningServer, name: str) -> None:
    path, body = OTHER_BODIES[name]
    response = tiny_server.http().post(path, json=body)
    assert response.status_code == 400 and response.json()["error"]["message"]  # the rest is as that API spells it


def test_a_bias_is_cut_to_the_largest_one(tiny_server: RunningServer) -> None:
    body = {"prompt": "a", "n_predict": 1, "logit_bias": [[5, 10**400], [6, -(10**400)]]}
    biases = tiny_server.http().post("/completion", json=body).json()["generation_settings"]["logit_bias"]
    assert biases == [{"token": 5, "bias": 100.0}, {"token": 6, "bias": -100.0}]


@pytest.mark.slow
@pytest.mark.parametrize("prompt", ["", [], [[]], [-1], [10**9], [1.5], ["a", 1], {"a": 1}, None, True])
def test_a_malformed_prompt_is_refused(tiny_server: RunningServer, prompt: object) -> None:
    error_message(tiny_server.http().post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 2}))


@pytest.mark.slow
def test_ten_megabytes_are_refused_by_their_length_and_without_it(tiny_server: RunningServer) -> None:
    body = b'{"prompt": "' + b"a" * 10_000_000 + b'"}'

    def without_length() -> Iterator[bytes]:
        yield from (body[start : start + 65536] for start in range(0, len(body), 65536))

    assert tiny_server.http().post(COMPLETIONS, content=body, headers=JSON).status_code == 413
    try:
        response = tiny_server.http().post(COMPLETIONS, content=without_length(), headers=JSON)
        assert response.status_code == 413
    except httpx.WriteError:
        pass  # the server responded and closed before the whole body was sent


@pytest.mark.parametrize(("headers", "status"), [({}, 404), ({"Origin": "http://foe.example"}, 415)])
def test_a_request_without_a_body_needs_no_content_type(
    tiny_server: RunningServer, headers: dict[str, str], status: int
) -> None:
    assert tiny_server.http().post("/v1/responses/resp_1/cancel", headers=headers).status_code == status


@pytest.mark.slow
def test_a_body_of_another_content_type_is_refused(tiny_server: RunningServer) -> None:
    plain_text = {"Content-Type": "text/plain"}
    error_message(tiny_server.http().post(COMPLETIONS, content=b'{"prompt": "a"}', headers=plain_text))


@pytest.mark.slow
def test_another_host_header_is_refused(tiny_server: RunningServer) -> None:
    error_message(tiny_server.http(Host="evil.example").get("/v1/models"))
    assert tiny_server.http(Host=f"localhost:{tiny_server.port}").get("/v1/models").status_code == 200


@pytest.mark.slow
def test_unknown_paths_and_methods(tiny_server: RunningServer) -> None:
    assert tiny_server.http().get("/v1/nothing").status_code == 404
    assert tiny_server.http().get(CHAT).status_code == 405
    assert tiny_server.http().get("/page/../app.py").status_code == 404
    assert tiny_server.http().get("/page/%2e%2e/app.py").status_code == 404


@pytest.mark.slow
def test_a_half_open_connection_is_closed(tiny_server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", tiny_server.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        connection.settimeout(60)
        assert connection.recv(1024) == b""  # closed without a response


@pytest.mark.slow
def test_a_body_that_never_arrives_times_out(tiny_server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", tiny_server.port)) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
        connection.settimeout(60)
        assert b"408" in connection.recv(4096).split(b"\r\n", 1)[0]


@pytest.mark.slow
def test_a_slow_reader_does_not_delay_other_requests(tiny_server: RunningServer) -> None:
    body = json.dumps({"prompt": "abc", "max_tokens": 300, "stream": True, "ignore_eos": True}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", tiny_server.port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        connection.sendall(head.encode() + body)
        started = time.monotonic()
        assert tiny_server.http().post(COMPLETIONS, json={"prompt": "abc", "max_tokens": 2}).status_code == 200
        assert time.monotonic() - started < 30


def test_garbage_instead_of_http(tiny_server: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", tiny_server.port)) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20 + b"\r\n\r\n")
        connection.settimeout(60)
        response = connection.recv(4096)
    assert not response or response.startswith(b"HTTP/1.1 400")


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "code"), [(RuntimeError("injected"), "model_failed"), (OutOfMemory("full"), "out_of_memory")]
)
def test_a_failing_pass_is_a_500_for_its_batch_alone(
    tiny_server: RunningServer, error: Exception, code: str, stream: bool
) -> None:
    with failing_pass(tiny_server, error, again=code == "out_of_memory"):  # a full cache is emptied and tried again
        response = tiny_server.http().post(COMPLETIONS, json={"prompt": "some text", "max_tokens": 4, "stream": stream})
    assert response.status_code == 500 and response.json()["error"]["code"] == code


@pytest.mark.slow
def test_a_failure_in_the_middle_of_a_stream_is_the_last_event(tiny_server: RunningServer) -> None:
    body = {"prompt": "some text", "max_tokens": 400, "stream": True, "ignore_eos": True}
    with slowed(tiny_server, 0.01), tiny_server.http().stream("POST", COMPLETIONS, json=body) as response:
        lines = response.iter_lines()
        next(lines)
        with failing_pass(tiny_server, RuntimeError("injected")):
            events = [line for line in lines if line]
    assert "model_failed" in events[-1]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_aborts_its_request(tiny_server: RunningServer, stream: bool) -> None:
    before = tiny_server.wait_until_idle()
    tokens_before = before.spec.new_tokens
    body = {"prompt": "some text", "max_tokens": 450, "stream": stream, "ignore_eos": True}
    with slowed(tiny_server, 0.01):
        if stream:
            with tiny_server.http().stream("POST", COMPLETIONS, json=body) as response:
                next(response.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{tiny_server.url}{COMPLETIONS}", json=body, timeout=httpx.Timeout(30, read=0.3))
        after = tiny_server.wait_until_idle()
    assert after.spec.new_tokens - tokens_before < 450, "the sequence must not be generated to its end"
    assert after.blocks_free + after.blocks_cached == before.blocks_free + before.blocks_cached


@pytest.mark.slow
def test_a_model_has_several_names(tiny_server: RunningServer) -> None:
    for name in (NAME, "alias"):
        body = {"model": name, "prompt": "a", "max_tokens": 1}
        assert tiny_server.http().post(COMPLETIONS, json=body).status_code == 200
