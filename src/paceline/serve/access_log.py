"""One JSON line a request, without prompts and outputs unless they are asked for."""

from __future__ import annotations

import json
import logging
import sys
import time
import uuid
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.serve.auth import KEY_SCOPE
from paceline.serve.metrics import Metrics
from paceline.serve.tracing import RequestTracer

LOG = logging.getLogger("paceline.serve")
LOG_FIELDS = "paceline_log_fields"  # where the scope of a request holds what its route adds to the log line


class JsonLines(logging.Formatter):
    """A log record as one JSON document."""

    def format(self, record: logging.LogRecord) -> str:
        timestamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{timestamp}.{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
        }
        line |= record.__dict__.get("fields", {})
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging(level: str) -> None:
    """Send the log lines of paceline and uvicorn to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("paceline", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())


class AccessLogMiddleware:
    """Counts, times, logs and traces every request, and gives it an id."""

    def __init__(self, app: ASGIApp, metrics: Metrics, tracer: RequestTracer) -> None:
        self._app, self._metrics, self._tracer = app, metrics, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, start, status = uuid.uuid4().hex, time.perf_counter(), 500
        extra: dict[str, Any] = scope.setdefault(LOG_FIELDS, {})

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._record(scope, request_id, extra.pop("status", status), time.perf_counter() - start)

    def _record(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        # An unknown path is not a label: clients could create labels without end.
        route = scope["route"].path if "route" in scope else "other"
        self._metrics.observe_request(route, status, seconds)
        fields = {"id": request_id, "method": scope["method"], "route": route, "status": status}
        fields |= {"seconds": round(seconds, 4)}
        if scope.get(KEY_SCOPE):
            fields["key"] = scope[KEY_SCOPE]
        fields |= scope[LOG_FIELDS]
        LOG.info("request", extra={"fields": fields})
        self._tracer.record(scope, fields, seconds)
