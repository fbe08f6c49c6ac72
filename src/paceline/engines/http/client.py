"""HTTP to one server: JSON documents and server-sent events. Whatever goes wrong is one line in the user's words.

Every request has a connection of its own: closing it is how a request is aborted, on every server alike.
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from paceline.errors import ContextLengthExceeded, EngineFailed, MissingExtra, OptionError, PacelineError, StepFailed

if TYPE_CHECKING:
    import httpx

Json = dict[str, Any]
CONNECT_SECONDS = 10.0
OPEN_SECONDS = 30.0  # for the few documents that are read when an engine is opened
TOO_LONG = ("context length", "context size", "context_length", "maximum context", "exceed_context")
EVENT = "data:"
DONE = "[DONE]"


class HttpClient:
    """One server.

    subject       names it in errors
    read_timeout  seconds without a byte before the server counts as lost
    use_proxy     whether the proxies of the environment apply; never for a server of our own on this machine
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        subject: str | None = None,
        read_timeout: float | None = None,
        use_proxy: bool = True,
    ) -> None:
        httpx = _httpx()
        self.url, self.subject = url, subject or f"the server at {url}"
        headers = {"Connection": "close"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS, read=read_timeout)
        verify = url.startswith("https")  # reading the certificates takes a while
        shared: dict[str, Any] = {"headers": headers, "verify": verify, "trust_env": use_proxy}
        self._shared = shared
        self._client = httpx.AsyncClient(limits=limits, timeout=timeout, **shared)

    def get(self, path: str) -> str:
        """The document of a path, before there is an event loop. Raises EngineFailed or OptionError."""
        with self._explained():
            response = _httpx().get(self.url + path, timeout=OPEN_SECONDS, **self._shared)
            self._check(response.status_code, response.text)
            return str(response.text)

    def get_json(self, path: str) -> Any:
        """The same, read as JSON."""
        text = self.get(path)
        try:
            return json.loads(text)
        except ValueError as error:
            raise EngineFailed(f"{self.subject} answered {path} with something other than JSON") from error

    async def text(self, path: str) -> str:
        """The document of a path."""
        with self._explained():
            response = await self._client.get(self.url + path)
            self._check(response.status_code, response.text)
            return str(response.text)

    async def events(self, path: str, body: Json) -> AsyncIterator[Json]:
        """Post a body and yield the events of the answer. Closing the iterator closes the connection."""
        with self._explained():
            async with self._client.stream("POST", self.url + path, json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    self._check(response.status_code, response.text)
                async for line in response.aiter_lines():
                    if line.startswith(EVENT) and (data := line[len(EVENT) :].strip()) != DONE:
                        yield self._event(data)

    async def close(self) -> None:
        await self._client.aclose()

    def _event(self, data: str) -> Json:
        """One event. An error that the server sends inside a stream is raised."""
        event = json.loads(data)
        if not isinstance(event, dict):
            raise EngineFailed(f"{self.subject} sent an event that is no JSON object")
        if error := event.get("error"):
            raise self._failure(_code(error), _message(error))
        return event

    def _check(self, status: int, text: str) -> None:
        """Raise the error that an answer stands for."""
        if status < 400:
            return
        try:
            document = json.loads(text)
        except ValueError:
            document = None
        error = document.get("error", document) if isinstance(document, dict) else text
        raise self._failure(status, _message(error))

    def _failure(self, status: int, message: str) -> PacelineError:
        if status in (401, 403):
            return OptionError(f"{self.subject} wants an API key (engine option api_key, or OPENAI_API_KEY): {message}")
        if status == 400 and any(words in message for words in TOO_LONG):
            return ContextLengthExceeded(f"{self.subject}: {message}")
        if status in (429, 503):
            return StepFailed(f"{self.subject} takes no requests now: {message}")
        kind = OptionError if 400 <= status < 500 else StepFailed
        return kind(f"{self.subject} answered {status}: {message}")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """A connection that cannot be made, or is lost, as EngineFailed."""
        httpx = _httpx()
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise EngineFailed(f"{self.subject} cannot be reached: {_reason(error)}; is it running?") from error
        except (httpx.TransportError, httpx.StreamError, httpx.InvalidURL) as error:
            raise EngineFailed(f"the connection to {self.subject} was lost: {_reason(error)}") from error
        except json.JSONDecodeError as error:
            raise EngineFailed(f"{self.subject} sent an event that is not JSON") from error


def server_url(url: Any) -> str:
    """The address of a server, without the /v1 that users of OpenAI's client write. Raises OptionError."""
    parts = urllib.parse.urlsplit(url) if isinstance(url, str) else None
    if parts is None or parts.scheme not in ("http", "https") or not parts.netloc:
        raise OptionError(f"url must be the address of a server such as http://localhost:8000, not {url!r}")
    return str(url).rstrip("/").removesuffix("/v1")


def _httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise MissingExtra("httpx", "http") from error
    return httpx


def _reason(error: httpx.HTTPError | httpx.InvalidURL | httpx.StreamError) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _message(error: Any) -> str:
    """The words of an error, in one line: servers put them at different places."""
    for name in ("message", "detail", "error"):
        if isinstance(error, dict) and error.get(name):
            return _message(error[name])
    return " ".join(str(error).split())[:300] or "no reason given"


def _code(error: Any) -> int:
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 500
