"""Several models behind one port: a request goes to the routes of the model that it names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.serve.auth import OLLAMA_PREFIX
from paceline.serve.config import RequestLimits
from paceline.serve.errors import ApiError
from paceline.serve.limits import LimitedRequest, strict_json

DEFAULT_TAG = ":latest"  # what Ollama's clients add to a name


class ModelDispatch:
    """Sends a request to the application of its model: the `model` of a body or of the query.

    app   for requests that name no model, or one of default_names
    apps  the applications of the other models by name
    """

    def __init__(
        self, app: ASGIApp, default_names: tuple[str, ...], apps: Mapping[str, ASGIApp], limits: RequestLimits
    ) -> None:
        self._app, self._apps = app, {**dict.fromkeys(default_names, app), **apps}
        self._request_class = type("DispatchRequest", (LimitedRequest,), {"limits": limits})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            if scope["method"] == "POST":
                body = await self._request_class(scope, receive).body()
                app, receive = self._app_of(model_of_body(body, scope["path"])), with_body(body, receive)
            else:
                app = self._app_of(model_of_query(scope))
        except ApiError as error:
            await error.response(scope["path"])(scope, receive, send)
            return
        await app(scope, receive, send)

    def _app_of(self, name: str | None) -> ASGIApp:
        if name is None:
            return self._app
        app = self._apps.get(name) or self._apps.get(name.removesuffix(DEFAULT_TAG))
        if app is None:
            message = f"there is no model {name[:80]!r} here; there is {', '.join(self._apps)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return app


def model_of_body(body: bytes, path: str) -> str | None:
    """The model that a body names; older clients of Ollama call it the name.

    What is wrong with a body is said by the route that it was sent to.
    """
    try:
        document: Any = strict_json(body)
    except ApiError:
        return None
    fields = document if isinstance(document, dict) else {}
    name = fields.get("model")
    if name is None and path.startswith(OLLAMA_PREFIX):
        name = fields.get("name")
    return name if isinstance(name, str) else None


def model_of_query(scope: Scope) -> str | None:
    names = parse_qs(scope["query_string"].decode("latin-1")).get("model")
    return names[0] if names else None


def with_body(body: bytes, receive: Receive) -> Receive:
    """Receives a body that has been read already, then what comes after it."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return messages.pop() if messages else await receive()

    return replay
