"""Routes about the server itself, its documentation, and plain words for what a text model does not do."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse

from paceline import __version__
from paceline.serve.api_shape import Json
from paceline.serve.context import ServerContext
from paceline.serve.errors import ApiError

DOCS_PAGE = Path(__file__).parent / "page" / "docs.html"
ANY_METHOD = ["GET", "POST", "DELETE"]
NO_SOUND = "this server runs a text model; it neither hears nor speaks"
NO_PICTURES = "this server runs a text model; it draws no images"
NO_SCORES = "this server runs a language model, which ranks and scores nothing; /v1/embeddings gives vectors to compare"
NO_JOBS = "this server answers requests as they come; it keeps no files and runs no batches"
NO_TUNING = "this server does not train; `paceline train` makes draft heads and draft models"
# Paths that clients try, with what to tell them. A path that ends with a slash stands for all below it.
UNSUPPORTED: dict[str, str] = {
    "/v1/audio/": NO_SOUND,
    "/v1/realtime": NO_SOUND,
    "/v1/images/": NO_PICTURES,
    "/v1/videos": NO_PICTURES,
    **dict.fromkeys(
        (
            "/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking", "/score", "/v1/score",
            "/classify", "/v1/classify", "/pooling", "/v1/moderations",
        ),
        NO_SCORES,
    ),
    **dict.fromkeys(("/v1/files", "/v1/uploads", "/v1/batches", "/v1/vector_stores", "/v1/messages/batches"), NO_JOBS),
    "/v1/fine_tuning/": NO_TUNING,
    **dict.fromkeys(
        ("/v1/assistants", "/v1/threads", "/v1/conversations"), "this server keeps conversations in /v1/responses only"
    ),
    "/lora-adapters": "adapters are chosen when the server starts",
}  # fmt: skip


def add_server_routes(routes: APIRouter, context: ServerContext) -> None:
    @routes.get("/version")
    async def version() -> Json:
        """The version of this server."""
        return {"version": __version__}

    @routes.get("/ping")
    @routes.post("/ping", include_in_schema=False)
    async def ping() -> Json:
        """Whether the server answers at all; /health says whether it takes requests."""
        return {}

    @routes.get("/load")
    async def load() -> Json:
        """How many sequences are in flight."""
        return {"server_load": context.admission.in_flight}

    @routes.get("/docs", include_in_schema=False)
    async def docs() -> FileResponse:
        return FileResponse(DOCS_PAGE)

    for path, reason in UNSUPPORTED.items():
        _refuse(routes, path, reason)


def _refuse(routes: APIRouter, path: str, reason: str) -> None:
    async def refuse() -> None:
        raise ApiError(501, reason, code="not_supported")

    full_path = f"{path}{{rest:path}}" if path.endswith("/") else path
    routes.add_api_route(full_path, refuse, methods=ANY_METHOD, include_in_schema=False)
