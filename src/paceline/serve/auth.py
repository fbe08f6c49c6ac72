"""Who is let in: API keys, hosts, headers. All of it before a body is read."""

from __future__ import annotations

import hashlib
import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.serve.errors import ApiError
from paceline.serve.settings import ServerConfig

OPEN_PATHS = ("/health", "/")  # and the page's own files
PAGE = "/page/"
NO_KEY = "anonymous"
PAGE_POLICY = "default-src 'self'; connect-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'"
HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY"}


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Keys:
    """API keys, compared in constant time. Only their hashes are kept."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = [digest(key) for key in keys]

    def owner(self, authorization: str) -> str | None:
        """A short name for the key sent, or None if it is not one of ours. Looks at all keys, whichever fits."""
        if not self._digests:
            return NO_KEY
        word, _, sent = authorization.partition(" ")
        given = digest(sent.strip())
        fits = [hmac.compare_digest(given, known) for known in self._digests]
        return given.hex()[:8] if any(fits) and word.lower() == "bearer" else None


class AuthMiddleware:
    """Turns away what may not come in, and sets the headers of what goes out."""

    def __init__(self, app: ASGIApp, settings: ServerConfig) -> None:
        self._app, self._settings = app, settings
        self._keys = Keys(settings.keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def outwards(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Content-Security-Policy", PAGE_POLICY)
            await send(message)

        try:
            scope["paceline_key"] = self._checked(scope, Headers(scope=scope))
        except ApiError as error:
            await error.response()(scope, receive, outwards)
            return
        await self._app(scope, receive, outwards)

    def _checked(self, scope: Scope, headers: Headers) -> str:
        """The key's short name. Raises ApiError."""
        if not self._known_host(headers.get("host", "")):
            raise ApiError(403, "this server does not answer to that host name; --allowed-host adds one", code="host")
        path, method = scope["path"], scope["method"]
        if method == "OPTIONS" or path in OPEN_PATHS or path.startswith(PAGE):
            return NO_KEY
        owner = self._keys.owner(headers.get("authorization", ""))
        if owner is None:
            words = "a valid API key is needed: Authorization: Bearer KEY"
            raise ApiError(401, words, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        # A form posted by some web page cannot carry this type without asking first.
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if method == "POST" and kind != "application/json":
            raise ApiError(415, "the body must be JSON: Content-Type: application/json")
        return owner

    def _known_host(self, host: str) -> bool:
        if not self._settings.hosts:
            return True
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            return False
        return name in self._settings.hosts
