"""Requests to one server, whole, streamed, or broken off in the middle."""

from __future__ import annotations

import asyncio
import json
import urllib.parse
from collections.abc import AsyncIterator
from typing import Any

import httpx

from paceline.doctor.answer import Answer, Json
from paceline.doctor.query import Query, curl
from paceline.errors import EngineClosed, OptionError

TIMEOUT = 180.0
BUSY = (429, 503)
RETRIES, RETRY_SECONDS = 6, 0.5
MAX_MESSAGE = 200


class RequestRefused(Exception):
    """The server does not take a request of this kind: what depends on it cannot be shown."""


class RequestFailed(Exception):
    """The server broke on a request that it takes."""

    def __init__(self, message: str, query: Query) -> None:
        super().__init__(message)
        self.query = query


class ServerClient:
    """One server and one model on it."""

    def __init__(self, url: str, model: str = "", api_key: str | None = None, key_variable: str | None = None) -> None:
        self.url, self.model = base_url(url), model
        self._key_variable = key_variable if api_key else None
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # A connection a request: one that the server closes while it is idle would look like a fault.
        limits = httpx.Limits(max_connections=128, max_keepalive_connections=0)
        self._http = httpx.AsyncClient(headers=headers, timeout=TIMEOUT, limits=limits, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()

    def curl(self, query: Query) -> str:
        return curl(query, self.url, self.model, self._key_variable)

    # --- other documents ----------------------------------------------------------------------------------------------

    async def models(self) -> list[Json]:
        """What /models lists. Raises EngineClosed where there is no such server, OptionError where it wants a key."""
        try:
            response = await self._http.get(f"{self.url}/models")
        except httpx.HTTPError as error:
            raise EngineClosed(
                f"{self.url} cannot be reached ({error or type(error).__name__}); is it running?"
            ) from error
        if response.status_code in (401, 403):
            raise OptionError(f"{self.url} wants a key: name the variable that holds it with --api-key-env")
        document = _document(response)
        models = document.get("data")
        return [item for item in models if isinstance(item, dict)] if isinstance(models, list) else []

    async def fetch(self, path: str) -> str | None:
        """A document beside /v1, such as /metrics; None where there is none."""
        try:
            response = await self._http.get(self.url.removesuffix("/v1") + path)
        except httpx.HTTPError:
            return None
        return response.text if response.status_code == 200 else None

    # --- completions --------------------------------------------------------------------------------------------------

    async def ask(self, query: Query) -> Answer:
        """The first choice. Raises RequestRefused or RequestFailed."""
        return (await self.ask_all(query))[0]

    async def ask_all(self, query: Query) -> list[Answer]:
        """Every choice of a response."""
        response = await self._sent(query)
        document = _document(response)
        choices = document.get("choices")
        if not isinstance(choices, list) or not choices:
            raise RequestFailed("it answered without a choice", query)
        answers = [Answer() for _ in choices]
        for answer, choice in zip(answers, choices):
            answer.add(choice, document)
        return answers

    async def stream(self, query: Query, chunks: int | None = None) -> Answer:
        """A streamed answer, put together. chunks: disconnect after so many of them."""
        answer = Answer()
        number = 0
        async for document in self._events(query):
            for choice in document.get("choices") or []:
                answer.add(choice, document)
            answer.add_usage(document)
            number += 1
            if chunks is not None and number >= chunks:
                break
        return answer

    async def _sent(self, query: Query) -> httpx.Response:
        for attempt in range(RETRIES):
            try:
                response = await self._http.post(f"{self.url}/{query.path}", json=self._body(query))
            except httpx.HTTPError as error:
                raise _broken(error, query) from error
            if response.status_code not in BUSY:
                break
            await asyncio.sleep(RETRY_SECONDS * 2**attempt)
        _check_status(response, query)
        return response

    async def _events(self, query: Query) -> AsyncIterator[Json]:
        body = self._body(query.changed(stream=True))
        try:
            async with self._http.stream("POST", f"{self.url}/{query.path}", json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                _check_status(response, query)
                async for line in response.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if line.startswith("data:") and data != "[DONE]":
                        yield _event(data, query)
        except httpx.HTTPError as error:
            raise _broken(error, query) from error

    def _body(self, query: Query) -> Json:
        return {"model": self.model, **query.body}


def base_url(url: str) -> str:
    """The address that the routes are under, always with /v1."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise OptionError(f"{url!r} is not the address of a server; write one such as http://localhost:8000")
    base = url.rstrip("/")
    return base if base.endswith("/v1") else f"{base}/v1"


def _check_status(response: httpx.Response, query: Query) -> None:
    status = response.status_code
    if status == 200:
        return
    message = f"it answered {status}: {_message(response)}"
    if status < 500 or status in (501, *BUSY):
        raise RequestRefused(message)
    raise RequestFailed(message, query)


def _message(response: httpx.Response) -> str:
    return " ".join(response.text[:MAX_MESSAGE].split())


def _broken(error: httpx.HTTPError, query: Query) -> Exception:
    if isinstance(error, httpx.TimeoutException):
        return RequestRefused(f"no answer within {TIMEOUT:.0f} s")
    return RequestFailed(f"the connection broke ({type(error).__name__} {error})", query)


def _document(response: httpx.Response) -> Json:
    try:
        document: Any = response.json()
    except ValueError:
        document = None
    return document if isinstance(document, dict) else {}


def _event(data: str, query: Query) -> Json:
    try:
        document: Any = json.loads(data)
    except ValueError as error:
        raise RequestFailed(f"an event of the stream is not JSON: {data[:80]!r}", query) from error
    if not isinstance(document, dict):
        raise RequestFailed(f"an event of the stream is not an object: {data[:80]!r}", query)
    if "error" in document:
        raise RequestFailed(f"the stream ended with an error: {str(document['error'])[:MAX_MESSAGE]}", query)
    return document
