"""How a family of routes shows a completion: OpenAI's own documents, or a translation of them.

Every route that generates text builds a chat completion or a completion first. A shape turns that document, or the
chunks of its stream, into what the clients of another API read, and frames the events of the stream.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi.responses import JSONResponse

from paceline.serve.errors import ApiError

Json = dict[str, Any]
EVENTS, LINES = "text/event-stream", "application/x-ndjson"
LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


class ApiShape:
    """OpenAI's own shape: documents and chunks stay as they are. One instance serves one request."""

    media_type = EVENTS
    ping = ": ping\n\n"  # what clients skip; empty: there is nothing that they do
    prompt_tokens = 0  # of the request, known before its output
    prompt_ids: Sequence[int] = ()  # of its first choice
    first_token: float | None = None  # when it came, by the clock of time.perf_counter

    def whole(self, document: Json) -> Any:
        """The response to a request without a stream."""
        return document

    def chunks(self, chunks: AsyncGenerator[Json, None]) -> AsyncGenerator[Json, None]:
        """The events of a stream."""
        return chunks

    def frame(self, event: Json) -> str:
        """An event as it is sent."""
        return f"data: {as_line(event)}\n\n"

    def last_frame(self) -> str:
        """What ends a stream that has not failed."""
        return "data: [DONE]\n\n"

    def error(self, error: ApiError) -> Json:
        """The event that ends a stream that has failed."""
        return error.body


class NamedEvents(ApiShape):
    """Server-sent events whose name is their type."""

    def frame(self, event: Json) -> str:
        return f"event: {event['type']}\ndata: {as_line(event)}\n\n"

    def last_frame(self) -> str:
        return ""


class JsonLinesShape(ApiShape):
    """One JSON document a line."""

    media_type = LINES
    ping = ""

    def frame(self, event: Json) -> str:
        return f"{as_line(event)}\n"

    def last_frame(self) -> str:
        return ""

    def error(self, error: ApiError) -> Json:
        return {"error": error.message}


class Document(JSONResponse):
    """A JSON response. Half characters that a client sent become question marks instead of an error."""

    def render(self, content: Any) -> bytes:
        return as_text(content).encode("utf-8", "replace")


def as_text(document: Any) -> str:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def as_line(document: Any) -> str:
    """JSON for a reader of lines: Python's `splitlines` and others end one at three characters that JSON leaves as
    they are."""
    return as_text(document).translate(LINE_ENDS)
