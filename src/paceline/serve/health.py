"""Health for load balancers and Kubernetes.

/health        the state of every engine: 200, or 503 with the reason
/health/ready  whether requests should be sent here now: 503 during a restart and at shutdown
/health/live   whether the process should go on: 503 where an engine has failed and will not be opened again
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse

from paceline.errors import EngineFailed, EngineRestarting
from paceline.serve.context import ServerContext

OK, RESTARTING, FAILED, SHUTTING_DOWN = "ok", "restarting", "failed", "shutting_down"
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """The state of one engine, and why it is not well."""

    status: str
    reason: str = ""

    @classmethod
    def of(cls, context: ServerContext) -> EngineHealth:
        try:
            context.engine.check_health()
        except EngineRestarting as error:
            return cls(RESTARTING, str(error))
        except EngineFailed as error:
            return cls(FAILED, str(error))
        return cls(SHUTTING_DOWN if context.admission.shutting_down else OK)

    def document(self, context: ServerContext) -> Json:
        stats = context.engine.stats()
        waiting = stats.waiting + context.queue.num_waiting
        reason = {"reason": self.reason} if self.reason else {}
        return {"status": self.status, "running": stats.running, "waiting": waiting, **reason}


def add_health_routes(routes: APIRouter, context: ServerContext, unhealthy: dict[int | str, dict[str, Any]]) -> None:
    """unhealthy: how the OpenAPI document describes a 503."""

    @routes.get("/health", responses=unhealthy)
    async def health() -> JSONResponse:
        """The state of the server and of every engine."""
        document = health_document(context)
        return JSONResponse(document, 200 if document["status"] == OK else 503)

    @routes.get("/health/ready", responses=unhealthy)
    async def ready() -> JSONResponse:
        """Whether requests should be sent here now."""
        status = worst_status(context)
        return JSONResponse({"status": status}, 200 if status == OK else 503)

    @routes.get("/health/live", responses=unhealthy)
    async def live() -> JSONResponse:
        """Whether the process should go on."""
        status = worst_status(context)
        return JSONResponse({"status": status}, 503 if status == FAILED else 200)


def worst_status(context: ServerContext) -> str:
    """The state of the server is that of the engine that is worst off."""
    statuses = {EngineHealth.of(peer).status for peer in context.peers}
    return next(status for status in (FAILED, RESTARTING, SHUTTING_DOWN, OK) if status in statuses)


def health_document(context: ServerContext) -> Json:
    """What /health answers. With several models each has its own state beside that of the server."""
    by_model = {peer.name: EngineHealth.of(peer).document(peer) for peer in context.peers}
    if len(by_model) == 1:
        return by_model.popitem()[1]
    totals = {name: sum(document[name] for document in by_model.values()) for name in ("running", "waiting")}
    return {"status": worst_status(context), **totals, "models": by_model}
