"""Which web pages of other origins may call the server: the headers that tell a browser so."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.serve.config import ANY_ORIGIN, LOCAL_ORIGINS, LOOPBACK

METHODS = "GET, POST, DELETE, OPTIONS"
MAX_AGE = "600"  # seconds for which a browser need not ask again
EXPOSED = "x-request-id, x-paceline-ignored, retry-after"  # what scripts may read beside the plain headers


class CorsMiddleware:
    """Answers the question a browser asks before it sends JSON, and marks the responses that a page may read.

    The header names the origin itself, never "*". Cookies are allowed only for origins that were named: a proxy before
    the server may keep a login in one, which any page could use otherwise.
    """

    def __init__(self, app: ASGIApp, origins: tuple[str, ...]) -> None:
        self._app = app
        self._named = frozenset(origin.rstrip("/") for origin in origins) - {ANY_ORIGIN, LOCAL_ORIGINS}
        self._any, self._local = ANY_ORIGIN in origins, LOCAL_ORIGINS in origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = Headers(scope=scope).get("origin") if scope["type"] == "http" else None
        if origin is None:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await PlainTextResponse("", headers=self._preflight(origin, headers))(scope, receive, send)
            return

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._allowed(origin))
                MutableHeaders(scope=message).add_vary_header("Origin")
            await send(message)

        await self._app(scope, receive, send_marked)

    def _preflight(self, origin: str, headers: Headers) -> dict[str, str]:
        """Headers of the answer; without one that allows the origin, the browser sends nothing."""
        allowed = self._allowed(origin)
        if not allowed:
            return {"Vary": "Origin"}
        asked = headers.get("access-control-request-headers")  # "*" would not stand for Authorization
        return {
            **allowed,
            "Vary": "Origin",
            "Access-Control-Allow-Methods": METHODS,
            "Access-Control-Max-Age": MAX_AGE,
            **({"Access-Control-Allow-Headers": asked} if asked else {}),
        }

    def _allowed(self, origin: str) -> dict[str, str]:
        """Headers that let a page of this origin read a response; none where it may not."""
        is_named = origin in self._named or (self._local and is_local(origin))
        if not is_named and not self._any:
            return {}
        headers = {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": EXPOSED}
        return headers | ({"Access-Control-Allow-Credentials": "true"} if is_named else {})


def is_local(origin: str) -> bool:
    """Whether an origin is a page of this machine, on any port."""
    try:
        parts = urlsplit(origin)
        return parts.scheme in ("http", "https") and parts.hostname in LOOPBACK
    except ValueError:
        return False
