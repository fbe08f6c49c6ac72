"""Authentication: API keys, Host headers and content types, checked before a body is read."""

from __future__ import annotations

import hashlib
import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.serve.config import NetworkConfig
from paceline.serve.errors import ApiError

# Served without a key, as are the files of the web page.
OPEN_PATHS = ("/health", "/health/ready", "/health/live", "/", "/docs", "/ping")
PAGE_PREFIX = "/page/"
UNSUPPORTED_PREFIXES = ("/v1/audio/", "/v1/images/", "/v1/files", "/v1/uploads")  # no text model does these
OLLAMA_PREFIX, JSON_TYPE = "/api/", "application/json"
NO_KEY = "anonymous"
KEY_SCOPE = "paceline_key"  # where the scope of a request holds the short name of its API key
PAGE_POLICY = "default-src 'self'; connect-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'"
SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": PAGE_POLICY,
}


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class ApiKeys:
    """API keys, compared in constant time. Only their hashes are kept."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = [digest(key) for key in keys]

    def owner(self, authorization: str) -> str | None:
        """A short name for the key of an Authorization header; None for an unknown key.

        The header is compared with every key, so that the time taken does not tell which one matches.
        """
        if not self._digests:
            return NO_KEY
        scheme, _, key = authorization.partition(" ")
        key_digest = digest(key.strip())
        matches = [hmac.compare_digest(key_digest, valid_digest) for valid_digest in self._digests]
        return key_digest.hex()[:8] if any(matches) and scheme.lower() == "bearer" else None


class AuthMiddleware:
    """Refuses requests that are not allowed, and adds security headers to every response."""

    def __init__(self, app: ASGIApp, network: NetworkConfig) -> None:
        self._app, self._accepted_hosts = app, network.accepted_hosts
        self._keys = ApiKeys(network.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            scope[KEY_SCOPE] = self._authenticate(scope, Headers(scope=scope))
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send_secured)
            return
        await self._app(scope, receive, send_secured)

    def _authenticate(self, scope: Scope, headers: Headers) -> str:
        """The short name of the API key. Raises ApiError 401, 403 or 415."""
        if not self._accepts_host(headers.get("host", "")):
            raise ApiError(403, "this Host header is not accepted; --allowed-host adds one", code="host")
        path, method = scope["path"], scope["method"]
        if method == "OPTIONS" or path in OPEN_PATHS or path.startswith(PAGE_PREFIX):
            return NO_KEY
        # Anthropic's clients send the key alone.
        owner = self._keys.owner(headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}")
        if owner is None:
            message = "a valid API key is needed: Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if method == "POST" and not path.startswith(UNSUPPORTED_PREFIXES):  # those are refused with better reasons
            self._check_content_type(scope, headers)
        return owner

    def _check_content_type(self, scope: Scope, headers: Headers) -> None:
        """A browser sends JSON from another origin only after a CORS preflight, and never without an Origin.

        Ollama's clients leave the content type out: a request that no browser sent is read as JSON.
        """
        content_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        if content_type == JSON_TYPE:
            return
        is_from_browser = "origin" in headers or "sec-fetch-site" in headers
        has_body = headers.get("content-length", "0") != "0" or "transfer-encoding" in headers
        if not has_body and not is_from_browser:  # as openai's client for Node cancels a response
            return
        if is_from_browser or not scope["path"].startswith(OLLAMA_PREFIX):
            raise ApiError(415, "the body must be JSON: Content-Type: application/json")
        others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
        scope["headers"] = [*others, (b"content-type", JSON_TYPE.encode())]

    def _accepts_host(self, host: str) -> bool:
        if not self._accepted_hosts:
            return True
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            return False
        return name in self._accepted_hosts
