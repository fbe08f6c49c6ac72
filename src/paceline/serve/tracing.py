"""OpenTelemetry traces: one span a request, with its tokens and what speculation did. Needs the extra `otel`.

A span carries what the access log carries, under the names of OpenTelemetry's conventions where there are some. A
client that sends a `traceparent` header finds the span in its own trace. Prompts and outputs are never part of it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from starlette.datastructures import Headers
from starlette.types import Scope

from paceline.errors import MissingExtra

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

SERVICE = "paceline"
ATTRIBUTES = {  # of a span, by field of the access log
    "id": "paceline.request_id",
    "key": "paceline.key",
    "model": "gen_ai.request.model",
    "response_id": "gen_ai.response.id",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "new_tokens": "gen_ai.usage.output_tokens",
    "choices": "gen_ai.request.choice.count",
    "stream": "paceline.stream",
    "draft_tokens": "paceline.draft_tokens",
    "accepted_tokens": "paceline.accepted_tokens",
}
OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
UNTRACED = ("/health", "/health/ready", "/health/live", "/metrics", "/page", "other")  # routes that are called all day


class RequestTracer(Protocol):
    """Told of every request that has ended."""

    def record(self, scope: Scope, fields: dict[str, Any], seconds: float) -> None:
        """fields: those of the access log, `route` and `status` among them."""

    def close(self) -> None:
        """Send what has not been sent yet."""


class NoTracer:
    """Traces nothing."""

    def record(self, scope: Scope, fields: dict[str, Any], seconds: float) -> None:
        return None

    def close(self) -> None:
        return None


class SpanTracer:
    """Writes a span for each request."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.propagate import extract
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._provider = TracerProvider(resource=Resource.create({"service.name": SERVICE}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer, self._extract = self._provider.get_tracer(SERVICE), extract

    def record(self, scope: Scope, fields: dict[str, Any], seconds: float) -> None:
        from opentelemetry.trace import SpanKind, StatusCode

        if fields["route"] in UNTRACED:
            return
        ended = time.time_ns()
        span = self._tracer.start_span(
            f"{fields['method']} {fields['route']}",
            context=self._extract(dict(Headers(scope=scope))),
            kind=SpanKind.SERVER,
            attributes=span_attributes(fields),
            start_time=ended - int(seconds * 1e9),
        )
        if fields["status"] >= 500:
            span.set_status(StatusCode.ERROR)
        span.end(ended)

    def close(self) -> None:
        self._provider.shutdown()


def span_attributes(fields: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a span, from the fields of the access log."""
    attributes = {ATTRIBUTES[name]: value for name, value in fields.items() if name in ATTRIBUTES}
    attributes |= {"http.request.method": fields["method"], "http.route": fields["route"]}
    attributes["http.response.status_code"] = fields["status"]
    if fields["route"] in OPERATIONS:
        attributes |= {"gen_ai.operation.name": OPERATIONS[fields["route"]], "gen_ai.provider.name": SERVICE}
    if fields.get("draft_tokens"):
        attributes["paceline.acceptance_rate"] = fields["accepted_tokens"] / fields["draft_tokens"]
    return attributes


def open_tracer(endpoint: str | None) -> RequestTracer:
    """The tracer of a server. endpoint: the URL of a collector that speaks OTLP over HTTP. Raises MissingExtra."""
    if endpoint is None:
        return NoTracer()
    try:
        return SpanTracer(otlp_exporter(endpoint))
    except ModuleNotFoundError as error:
        raise MissingExtra("opentelemetry", "otel") from error


def otlp_exporter(endpoint: str) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint)
