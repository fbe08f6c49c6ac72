"""Paths behind a proxy that puts a prefix before each of them."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPathMiddleware:
    """Serves every path with the prefix and without it."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app, self._prefix = app, f"/{root_path.strip('/')}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and (path == self._prefix or path.startswith(f"{self._prefix}/")):
            scope = {**scope, "path": path[len(self._prefix) :] or "/"}
        await self._app(scope, receive, send)
