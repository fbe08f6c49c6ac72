"""Admission control, and limits on request bodies."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from paceline.errors import PacelineError
from paceline.serve.auth import NO_KEY
from paceline.serve.config import RequestLimits
from paceline.serve.errors import RETRY_SOON, ApiError, as_api_error, log_failure

MAX_JSON_DEPTH = 64
CLOSE = {"Connection": "close"}


class AdmissionControl:
    """Counts the sequences in flight and refuses what exceeds the queue, so that no client waits without end.

    max_num_seqs   sequences the engine runs at a time; the rest of those in flight are waiting
    shutting_down  no request is admitted any more
    """

    def __init__(self, limits: RequestLimits, max_num_seqs: int) -> None:
        self._limits, self._max_num_seqs = limits, max_num_seqs
        self.in_flight = 0
        self.shutting_down = False
        self._requests_by_key: Counter[str] = Counter()

    @contextmanager
    def admit(self, key: str, num_seqs: int) -> Iterator[None]:
        """Count a request of so many sequences while it runs. Raises ApiError 429 or 503."""
        self.check(key, num_seqs)
        self.in_flight += num_seqs
        self._requests_by_key[key] += 1
        try:
            yield
        finally:
            self.in_flight -= num_seqs
            self._requests_by_key[key] -= 1
            if not self._requests_by_key[key]:
                del self._requests_by_key[key]

    def check(self, key: str, num_seqs: int = 1) -> None:
        """Raise ApiError 429 or 503 where a request of so many sequences would not be admitted now."""
        if self.shutting_down:
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers=RETRY_SOON)
        self._check_key(key)
        self._check_queue(num_seqs)

    def _check_key(self, key: str) -> None:
        limit = self._limits.max_requests_per_key
        if limit and key != NO_KEY and self._requests_by_key[key] >= limit:
            message = f"this API key has {limit} requests in progress"
            raise ApiError(429, message, code="key_busy", headers={"Retry-After": "1"})

    def _check_queue(self, num_seqs: int) -> None:
        num_waiting = self.in_flight - self._max_num_seqs
        if self.in_flight and num_waiting + num_seqs > self._limits.max_waiting:
            retry = {"Retry-After": str(1 + max(0, num_waiting) // self._max_num_seqs)}
            raise ApiError(429, "too many requests are waiting; retry later", code="queue_full", headers=retry)


class LimitedRequest(Request):
    """A request whose body is limited in size, time and depth."""

    limits: RequestLimits = RequestLimits()

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            self._body = await self._read()
        return self._body

    async def _read(self) -> bytes:
        declared = self.headers.get("content-length", "0")
        self._check_size(int(declared) if declared.isdigit() else 0)
        body = bytearray()
        try:
            async with asyncio.timeout(self.limits.stall_timeout):
                async for part in self.stream():
                    body += part
                    self._check_size(len(body))
        except TimeoutError:
            raise ApiError(408, "the body did not arrive in time", headers=CLOSE) from None
        return bytes(body)

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self.limits.max_body_bytes:
            raise ApiError(413, f"the body may have {self.limits.max_body_bytes} bytes at most", headers=CLOSE)

    async def json(self) -> Any:
        return strict_json(await self.body())


def strict_json(body: bytes) -> Any:
    """A JSON document without NaN and infinities, at most MAX_JSON_DEPTH levels deep. Raises ApiError 400."""
    try:
        document = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not valid JSON: {reason}") from None
    _check_depth(document)
    return document


def _check_depth(document: Any) -> None:
    """Level by level, because recursion would fail on the documents that are refused here."""
    containers, depth = [document], 0
    while containers:
        if depth > MAX_JSON_DEPTH:
            raise ApiError(400, f"the body is nested more than {MAX_JSON_DEPTH} levels deep")
        depth += 1
        containers = [child for container in containers for child in _children(container)]


def _children(value: Any) -> list[Any]:
    if not isinstance(value, dict | list):
        return []
    children = value.values() if isinstance(value, dict) else value
    return [child for child in children if isinstance(child, dict | list)]


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


def limited_route(limits: RequestLimits) -> type[APIRoute]:
    """A route class that reads request bodies under these limits."""
    request_class = type("RouteRequest", (LimitedRequest,), {"limits": limits})

    class LimitedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()

            async def limited_handler(request: Request) -> Response:
                try:
                    return await handler(request_class(request.scope, request.receive))
                except (HTTPException, RequestValidationError, PacelineError):
                    raise  # their handlers run inside all middleware
                except Exception as error:  # its handler would run outside: no headers, and the connection breaks
                    api_error = as_api_error(error)
                    log_failure(api_error, error)
                    return api_error.response(request.url.path)

            return limited_handler

    return LimitedRoute
