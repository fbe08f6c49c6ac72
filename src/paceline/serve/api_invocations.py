"""/invocations, the one path that model hosts such as SageMaker call: the fields of a body say what it asks for."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from paceline.serve.api_chat import checked
from paceline.serve.api_shape import Json
from paceline.serve.context import ServerContext
from paceline.serve.errors import ApiError
from paceline.serve.routes import ERROR_RESPONSES, chat_response, completion_response
from paceline.serve.schema import ChatRequest, CompletionRequest


def add_invocations_routes(routes: APIRouter, context: ServerContext) -> None:
    @routes.post("/invocations", responses=ERROR_RESPONSES, response_model=None)
    async def invocations(request: Request, body: dict[str, Any]) -> Response:
        """A chat completion for a body with messages, a completion for one with a prompt."""
        return await invoked(context, request, body)


async def invoked(context: ServerContext, request: Request, body: Json) -> Response:
    if "messages" in body:
        return await chat_response(context, request, checked(ChatRequest, body))
    if "prompt" in body:
        return await completion_response(context, request, checked(CompletionRequest, body))
    raise ApiError(400, "give messages for a chat completion, or a prompt for a completion")
