"""How much at a time, and strict reading of bodies."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute

from paceline.serve.auth import NO_KEY
from paceline.serve.errors import ApiError
from paceline.serve.settings import Limits

DEEPEST = 64  # levels of a JSON document


class AdmissionControl:
    """Counts texts in flight. What does not fit is told to come back, not kept waiting for ever."""

    def __init__(self, limits: Limits, batch: int) -> None:
        self._limits, self._batch = limits, batch
        self.in_flight = 0
        self.closing = False
        self._by_key: Counter[str] = Counter()

    @contextmanager
    def admit(self, key: str, texts: int) -> Iterator[None]:
        """Hold a place for a request of so many texts. Raises ApiError 429 or 503."""
        self._check(key, texts)
        self.in_flight += texts
        self._by_key[key] += 1
        try:
            yield
        finally:
            self.in_flight -= texts
            self._by_key[key] -= 1
            if not self._by_key[key]:
                del self._by_key[key]

    def _check(self, key: str, texts: int) -> None:
        if self.closing:
            raise ApiError(503, "the server is shutting down", code="closing", headers={"Retry-After": "5"})
        most = self._limits.per_key
        if most and key != NO_KEY and self._by_key[key] >= most:
            raise ApiError(
                429, f"this key has {most} requests in progress", code="key_busy", headers={"Retry-After": "1"}
            )
        ahead = self.in_flight - self._batch
        if self.in_flight and ahead + texts > self._limits.queue:
            wait = {"Retry-After": str(1 + max(0, ahead) // self._batch)}
            raise ApiError(429, "too many requests are waiting; try again soon", code="queue_full", headers=wait)


class StrictRequest(Request):
    """A request whose body has a size, a time and a depth."""

    limits: Limits = Limits()

    async def body(self) -> bytes:
        if not hasattr(self, "_body"):
            self._body = await self._read()
        return self._body

    async def _read(self) -> bytes:
        declared = self.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > self.limits.body_bytes:
            self._too_large()
        parts, size = [], 0
        try:
            async with asyncio.timeout(self.limits.stall):
                async for part in self.stream():
                    size += len(part)
                    if size > self.limits.body_bytes:
                        self._too_large()
                    parts.append(part)
        except TimeoutError:
            raise ApiError(408, "the body did not arrive in time", headers={"Connection": "close"}) from None
        return b"".join(parts)

    def _too_large(self) -> NoReturn:
        raise ApiError(
            413, f"the body may have {self.limits.body_bytes} bytes at most", headers={"Connection": "close"}
        )

    async def json(self) -> Any:
        return strict_json(await self.body())


def strict_json(body: bytes) -> Any:
    """A JSON document without NaN and infinities, not deeper than DEEPEST. Raises ApiError 400."""
    try:
        document = json.loads(body, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not valid JSON: {reason}") from None
    level, depth = [document], 0
    while level:
        if depth > DEEPEST:
            raise ApiError(400, f"the body is nested more than {DEEPEST} levels deep")
        depth += 1
        inside = (
            value.values() if isinstance(value, dict) else value for value in level if isinstance(value, dict | list)
        )
        level = [value for values in inside for value in values if isinstance(value, dict | list)]
    return document


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


def strict_route(limits: Limits) -> type[APIRoute]:
    """Routes whose bodies are read under these limits."""

    class Reading(StrictRequest):
        pass

    Reading.limits = limits

    class StrictRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def strictly(request: Request) -> Response:
                return await handle(Reading(request.scope, request.receive))

            return strictly

    return StrictRoute
