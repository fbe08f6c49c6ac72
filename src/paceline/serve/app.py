"""The application: routes, middleware, the web page."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from starlette.types import ASGIApp

from paceline import __version__
from paceline.core.protocols import Engine
from paceline.errors import PacelineError
from paceline.serve.access_log import AccessLogMiddleware
from paceline.serve.api_responses_store import ResponseStore
from paceline.serve.api_routes import api_router
from paceline.serve.auth import AuthMiddleware
from paceline.serve.config import ServerConfig
from paceline.serve.context import ModelToServe, ServerContext
from paceline.serve.cors import CorsMiddleware
from paceline.serve.errors import install_handlers
from paceline.serve.model_dispatch import ModelDispatch
from paceline.serve.root_path import RootPathMiddleware
from paceline.serve.routes import router
from paceline.serve.tracing import RequestTracer, open_tracer

Background = Callable[[], Awaitable[None]]
PAGE = Path(__file__).parent / "page"
ERROR_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


def create_app(
    engine: Engine,
    config: ServerConfig,
    others: Sequence[ModelToServe] = (),
    background: Sequence[Background] = (),
) -> FastAPI:
    """A server over an engine, which it closes at shutdown. `app.state.admission` decides whether it takes requests.

    others      further models
    background  work that runs beside the server; what it raises is `app.state.fatal_error`, which ends the server
    """
    contexts = ServerContext.of_models([ModelToServe(engine, config), *others])
    tracer = open_tracer(config.otlp_traces_endpoint)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(_watched(app, work)) for work in background]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for context in contexts:
            await context.close()
        await asyncio.to_thread(tracer.close)

    # FastAPI's own documentation loads scripts from other sites; the schema itself is at /openapi.json.
    app = FastAPI(title="paceline", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.admission, app.state.fatal_error = contexts[0].admission, None
    install_handlers(app)
    responses = ResponseStore()
    _add_routes(app, contexts[0], responses)
    _add_page(app)
    _describe_errors(app)
    _add_dispatch(app, contexts, responses)
    _add_middleware(app, contexts[0], tracer)
    return app


async def _watched(app: FastAPI, work: Background) -> None:
    try:
        await work()
    except PacelineError as error:
        app.state.fatal_error = error


def _add_routes(app: FastAPI, context: ServerContext, responses: ResponseStore) -> None:
    app.include_router(router(context))
    app.include_router(api_router(context, responses))


def _add_dispatch(app: FastAPI, contexts: list[ServerContext], responses: ResponseStore) -> None:
    """Further models have the same routes in applications of their own."""
    default, *others = contexts
    if others:
        apps: dict[str, ASGIApp] = {}
        for context in others:
            apps |= dict.fromkeys(context.config.served_model_names, _model_app(context, responses))
        names, limits = default.config.served_model_names, default.config.limits
        app.add_middleware(ModelDispatch, default_names=names, apps=apps, limits=limits)


def _model_app(context: ServerContext, responses: ResponseStore) -> FastAPI:
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    install_handlers(app)
    _add_routes(app, context, responses)
    return app


def _add_middleware(app: FastAPI, context: ServerContext, tracer: RequestTracer) -> None:
    """The last one added sees a request first."""
    network = context.config.network
    app.add_middleware(AuthMiddleware, network=network)
    if network.cors_origins:  # around the authentication: a page can read why it was refused
        app.add_middleware(CorsMiddleware, origins=network.cors_origins)
    app.add_middleware(AccessLogMiddleware, metrics=context.metrics, tracer=tracer)
    if network.root_path:
        app.add_middleware(RootPathMiddleware, root_path=network.root_path)


def _add_page(app: FastAPI) -> None:
    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)  # HEAD: clients ask whether a server is there
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    app.mount("/page", StaticFiles(directory=PAGE), name="page")


def _describe_errors(app: FastAPI) -> None:
    """Errors have OpenAI's shape, so FastAPI's description of its own 422 does not apply."""
    default_openapi = app.openapi

    def openapi() -> dict[str, Any]:
        document = default_openapi()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas["Error"] = ERROR_SCHEMA
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        for operations in document["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        return document

    app.openapi = openapi  # type: ignore[method-assign]
