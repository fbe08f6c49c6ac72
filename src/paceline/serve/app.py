"""The application: routes, middleware, the page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles
from starlette.middleware.cors import CORSMiddleware

from paceline import __version__
from paceline.core.protocols import Engine
from paceline.hub.tokenizer import Tokenizer
from paceline.serve import errors
from paceline.serve.access_log import AccessLogMiddleware
from paceline.serve.auth import AuthMiddleware
from paceline.serve.limits import AdmissionControl
from paceline.serve.metrics import Metrics
from paceline.serve.requests import Desk
from paceline.serve.responses import TokenFormatter
from paceline.serve.routes import ServerContext, router
from paceline.serve.settings import ServerConfig

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


def create_app(engine: Engine, tokenizer: Tokenizer, settings: ServerConfig) -> FastAPI:
    """A server over an engine, which it closes at the end. `app.state.gate` decides whether it takes requests."""
    metrics, gate = Metrics(engine), AdmissionControl(settings.limits, settings.batch)
    reader = ThreadPoolExecutor(1, "paceline-reader")
    desk = Desk(tokenizer, engine.info, settings)
    context = ServerContext(engine, desk, TokenFormatter(tokenizer, engine.info.eos_token_ids), gate, metrics, settings, reader)

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        gate.closing = True
        await engine.close()
        reader.shutdown()

    # FastAPI's own documentation pages load scripts from elsewhere; the schema itself is at /openapi.json.
    app = FastAPI(title="paceline", version=__version__, lifespan=life, docs_url=None, redoc_url=None)
    app.state.gate = gate
    errors.install(app)
    app.include_router(router(context))
    _add_page(app)
    _describe_errors(app)
    if settings.origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.origins), allow_methods=["GET", "POST"], allow_headers=["*"]
        )
    app.add_middleware(AuthMiddleware, settings=settings)
    app.add_middleware(AccessLogMiddleware, metrics=metrics)
    return app


def _add_page(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    app.mount("/page", StaticFiles(directory=PAGE), name="page")


def _describe_errors(app: FastAPI) -> None:
    """Our errors have OpenAI's shape, and FastAPI's description of its own 422 is not true here."""
    made = app.openapi

    def described() -> dict[str, Any]:
        schema = made()
        parts = schema.setdefault("components", {}).setdefault("schemas", {})
        parts["Error"] = ERROR_SCHEMA
        for name in ("HTTPValidationError", "ValidationError"):
            parts.pop(name, None)
        for operations in schema["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        return schema

    app.openapi = described  # type: ignore[method-assign]
