"""Traces of requests, as OpenTelemetry's SDK exports them."""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.errors import MissingExtra
from paceline.serve import tracing
from paceline.serve.app import create_app
from paceline.serve.config import NetworkConfig, ServerConfig
from paceline.serve.tracing import open_tracer, span_attributes
from tests.serve.running import CHAT, COMPLETIONS, NAME, serving
from tests.serve.toy_engine import ReversingEngine

ENDPOINT = "http://127.0.0.1:4318/v1/traces"
KEY = "the key of a client"
TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_attributes_are_those_of_the_access_log_without_prompts() -> None:
    fields = {"method": "POST", "route": CHAT, "status": 200, "model": "m", "prompt_tokens": 5, "new_tokens": 7}
    attributes = span_attributes({**fields, "draft_tokens": 8, "accepted_tokens": 6, "prompts": ["a secret"]})
    assert attributes["gen_ai.usage.input_tokens"] == 5 and attributes["gen_ai.usage.output_tokens"] == 7
    assert attributes["paceline.acceptance_rate"] == 0.75 and attributes["gen_ai.operation.name"] == "chat"
    assert attributes["http.response.status_code"] == 200 and "secret" not in str(attributes)
    assert "paceline.acceptance_rate" not in span_attributes({**fields, "draft_tokens": 0, "accepted_tokens": 0})


def test_a_missing_extra_is_said_when_the_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_opentelemetry(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("opentelemetry"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_opentelemetry)
    with pytest.raises(MissingExtra, match=r"pip install '\.\[otel\]'"):
        create_app(ReversingEngine(), ServerConfig((NAME,), otlp_traces_endpoint=ENDPOINT))
    open_tracer(None).close()


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    class KeepingExporter(InMemorySpanExporter):
        """Keeps its spans after the server has closed it."""

        def shutdown(self) -> None:
            return None

    memory = KeepingExporter()
    monkeypatch.setattr(tracing, "otlp_exporter", lambda endpoint: memory)
    yield memory


@pytest.mark.slow
def test_every_request_is_a_span_in_the_trace_of_its_client(exporter: Any) -> None:
    engine = ReversingEngine()
    network = NetworkConfig(api_keys=(KEY,))
    config = ServerConfig((NAME,), network=network, otlp_traces_endpoint=ENDPOINT, log_prompts=True)
    with serving(engine, config) as server:
        headers = {"Authorization": f"Bearer {KEY}", "traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        # A connection of its own for each request: a server closes idle ones, and a busy machine is slow to ask again.
        server.http(**headers).post(COMPLETIONS, json={"prompt": "abcdef"})
        server.http(**headers).post(CHAT, json={"messages": [{"role": "user", "content": "abcd"}], "stream": True})
        engine.failure = KeyError("a mistake in the engine")
        server.http(**headers).post(COMPLETIONS, json={"prompt": "abcdef"})
        server.http(**headers).get("/health")
    whole, stream, failed = exporter.get_finished_spans()
    assert [format(span.context.trace_id, "032x") for span in (whole, stream, failed)] == [TRACE] * 3
    assert whole.name == f"POST {COMPLETIONS}" and whole.end_time > whole.start_time
    assert whole.attributes["gen_ai.request.model"] == NAME
    assert whole.attributes["gen_ai.usage.input_tokens"] == whole.attributes["gen_ai.usage.output_tokens"] == 6
    assert whole.attributes["paceline.accepted_tokens"] == 3 and whole.attributes["paceline.acceptance_rate"] == 1
    assert stream.attributes["gen_ai.usage.output_tokens"] == 4 and stream.attributes["paceline.stream"]
    assert failed.attributes["http.response.status_code"] == 500 and not failed.status.is_ok
    assert "abcdef" not in str([dict(span.attributes) for span in (whole, stream, failed)])
