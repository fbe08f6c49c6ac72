"""The application: routes, middleware, the web page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from starlette.middleware.cors import CORSMiddleware

from paceline import __version__
from paceline.core.protocols import Engine
from paceline.serve.access_log import AccessLogMiddleware
from paceline.serve.api_responses_store import ResponseStore
from paceline.serve.api_routes import api_router
from paceline.serve.auth import AuthMiddleware
from paceline.serve.config import ServerConfig
from paceline.serve.context import ServerContext
from paceline.serve.errors import install_handlers
from paceline.serve.routes import router

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


def create_app(engine: Engine, config: ServerConfig) -> FastAPI:
    """A server over an engine, which it closes at shutdown. `app.state.admission` decides whether it takes requests."""
    context = ServerContext.of(engine, config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await context.close()

    # FastAPI's own documentation loads scripts from other sites; the schema itself is at /openapi.json.
    app = FastAPI(title="paceline", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.admission = context.admission
    install_handlers(app)
    app.include_router(router(context))
    app.include_router(api_router(context, ResponseStore()))
    _add_page(app)
    _describe_errors(app)
    _add_middleware(app, context)
    return app


def _add_middleware(app: FastAPI, context: ServerContext) -> None:
    """The last one added sees a request first."""
    network = context.config.network
    if network.cors_origins:
        origins = list(network.cors_origins)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
    app.add_middleware(AuthMiddleware, network=network)
    app.add_middleware(AccessLogMiddleware, metrics=context.metrics)


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
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
