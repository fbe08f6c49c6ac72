"""A stream that has nothing to say yet sends comments, so that no proxy cuts it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import openai
import pytest

from paceline.errors import StepFailed
from paceline.serve.config import RequestLimits, ServerConfig
from tests.serve.gated_engine import GatedEngine
from tests.serve.running import COMPLETIONS, NAME, RunningServer, serving

PING = b": ping\n\n"


@pytest.fixture
def engine() -> GatedEngine:
    return GatedEngine()


@pytest.fixture
def server(engine: GatedEngine) -> Iterator[RunningServer]:
    with serving(engine, ServerConfig((NAME,), limits=RequestLimits(ping_interval=0.05))) as running:
        yield running
        engine.opened.set()


class ObservedStream(httpx.SyncByteStream):
    """Shows every part of a body to a test before the client reads it."""

    def __init__(self, stream: httpx.SyncByteStream, observe: Callable[[bytes], None]) -> None:
        self._stream, self._observe = stream, observe

    def __iter__(self) -> Iterator[bytes]:
        for part in self._stream:
            self._observe(part)
            yield part

    def close(self) -> None:
        self._stream.close()


class ObservedTransport(httpx.HTTPTransport):
    """observe: called with every part of every body."""

    def __init__(self, observe: Callable[[bytes], None]) -> None:
        super().__init__()
        self._observe = observe

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        assert isinstance(response.stream, httpx.SyncByteStream)
        response.stream = ObservedStream(response.stream, self._observe)
        return response


def client_that_opens_the_gate_after_a_ping(server: RunningServer, engine: GatedEngine) -> openai.OpenAI:
    def observe(part: bytes) -> None:
        if PING in part:
            engine.opened.set()

    http_client = httpx.Client(transport=ObservedTransport(observe), timeout=60)
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=http_client)


def test_the_openai_client_ignores_pings(server: RunningServer, engine: GatedEngine) -> None:
    client = client_that_opens_the_gate_after_a_ping(server, engine)
    messages = [{"role": "user", "content": "olleh"}]
    chunks = list(client.chat.completions.create(model=NAME, messages=messages, stream=True))  # type: ignore[call-overload]
    assert engine.opened.is_set(), "a ping came before the first output"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello"
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.slow
def test_an_error_after_a_ping_is_an_event_of_the_stream(server: RunningServer, engine: GatedEngine) -> None:
    engine.late_failure = StepFailed("the model broke")
    client = client_that_opens_the_gate_after_a_ping(server, engine)
    with pytest.raises(openai.APIError, match="the model broke"):
        list(client.completions.create(model=NAME, prompt="abc", stream=True))


def test_an_error_before_the_first_ping_has_its_own_status(engine: GatedEngine) -> None:
    engine.opened.set()
    engine.late_failure = StepFailed("the model broke")
    with serving(engine, ServerConfig((NAME,))) as server:
        response = server.http().post(COMPLETIONS, json={"prompt": "abc", "stream": True})
    assert response.status_code == 500 and response.json()["error"]["code"] == "model_failed"


@pytest.mark.slow
def test_a_client_that_leaves_between_pings_aborts_its_sequence(server: RunningServer, engine: GatedEngine) -> None:
    body = {"prompt": "abc", "stream": True}
    with server.http().stream("POST", COMPLETIONS, json=body, timeout=60) as response:
        assert next(part for part in response.iter_bytes() if PING in part)
    engine.opened.set()
    assert server.http().post(COMPLETIONS, json={"prompt": "abc"}).status_code == 200


@pytest.mark.parametrize("interval", [0.0, 3600.0])
def test_a_stream_that_is_never_silent_has_no_pings(engine: GatedEngine, interval: float) -> None:
    engine.opened.set()
    with serving(engine, ServerConfig((NAME,), limits=RequestLimits(ping_interval=interval))) as server:
        text = server.http().post(COMPLETIONS, json={"prompt": "abc", "stream": True}).text
    assert "ping" not in text and text.endswith("data: [DONE]\n\n")
