"""One line a request: JSON, without prompts and without answers unless asked."""

from __future__ import annotations

import json
import logging
import sys
import time
import uuid
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.serve.metrics import Metrics

LOG = logging.getLogger("paceline.serve")
NOTES = "paceline_notes"  # what a route has to say about its request, in the scope


class JsonLines(logging.Formatter):
    """A record as one JSON document."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logs(level: str) -> None:
    """Lines go to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("paceline", "uvicorn"):
        log = logging.getLogger(name)
        log.handlers, log.propagate = [handler], False
        log.setLevel(level.upper())


class AccessLogMiddleware:
    """Counts, times and logs every request, and gives it an id."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        number, started, status = uuid.uuid4().hex, time.perf_counter(), 500
        notes: dict[str, Any] = scope.setdefault(NOTES, {})

        async def outwards(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = number
            await send(message)

        try:
            await self._app(scope, receive, outwards)
        finally:
            self._record(scope, number, notes.pop("status", status), time.perf_counter() - started, notes)

    def _record(self, scope: Scope, number: str, status: int, seconds: float, notes: dict[str, Any]) -> None:
        # An unknown path must not become a label: anyone could fill the memory with them.
        route = getattr(scope.get("route"), "path", "other")
        self._metrics.requests.labels(route, str(status)).inc()
        self._metrics.whole.labels(route).observe(seconds)
        fields = {
            "id": number,
            "method": scope["method"],
            "route": route,
            "status": status,
            "seconds": round(seconds, 4),
        }
        key = scope.get("paceline_key")
        LOG.info("request", extra={"fields": {**fields, **({"key": key} if key else {}), **notes}})
