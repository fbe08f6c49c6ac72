"""OpenAI's completions and models, and /health and /metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response

from paceline.serve.access_log import LOG_FIELDS
from paceline.serve.api_shape import ApiShape, Document
from paceline.serve.auth import KEY_SCOPE
from paceline.serve.context import ServerContext
from paceline.serve.errors import ApiError
from paceline.serve.extra_fields import add_header
from paceline.serve.health import add_health_routes
from paceline.serve.limits import limited_route
from paceline.serve.requests import COMPLETION_MAX_TOKENS, CompletionTask
from paceline.serve.responses import ChatFormat, CompletionFormat, Json, ResponseBuilder, ResponseFormat
from paceline.serve.rounding import near_tie_logprob
from paceline.serve.schema import ChatRequest, CompletionRequest
from paceline.serve.streaming import EventStream, first_chunk, while_connected
from paceline.serve.timings import TimedChatShape

ERROR_DESCRIPTIONS = {
    400: "The request is not valid; the message says why",
    401: "An API key is needed",
    404: "No such model",
    408: "The request took too long",
    413: "The body is too large",
    415: "The body is not JSON",
    429: "Too many requests; see Retry-After",
    500: "The model failed; other requests are not affected",
    503: "The server is shutting down, or an engine has failed",
}
ERROR_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {
        "description": description,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    for status, description in ERROR_DESCRIPTIONS.items()
}
Body = TypeVar("Body")
Result = TypeVar("Result")
PROMETHEUS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STARTED = int(time.time())
STARTED_AT = datetime.fromtimestamp(STARTED, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def router(context: ServerContext) -> APIRouter:
    """All routes of one server."""
    routes = APIRouter(route_class=limited_route(context.config.limits))
    _add_completion_routes(routes, context)
    _add_model_routes(routes, context)
    _add_monitoring_routes(routes, context)
    return routes


def _add_completion_routes(routes: APIRouter, context: ServerContext) -> None:
    @routes.post("/v1/chat/completions", responses=ERROR_RESPONSES, response_model=None)
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """The answer to chat messages."""
        return await chat_response(context, request, body, TimedChatShape.of(body, context.formatter.prompt_text))

    @routes.post("/v1/chat/completions/input_tokens", responses=ERROR_RESPONSES, response_model=None)
    @routes.post("/chat/completions/input_tokens", include_in_schema=False, response_model=None)
    async def count_chat_tokens(request: Request, body: ChatRequest) -> Json:
        """How many tokens the prompt of a chat has."""
        tokens = await while_connected(request, context.tokenized(context.requests.chat_prompt, body))
        return {"input_tokens": len(tokens)}

    @routes.post("/v1/completions", responses=ERROR_RESPONSES, response_model=None)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """The continuation of a prompt."""
        return await completion_response(context, request, body)


def _add_model_routes(routes: APIRouter, context: ServerContext) -> None:
    @routes.get("/v1/models")
    @routes.get("/models", include_in_schema=False)
    async def models() -> Json:
        """The models that are served, once for each of their names."""
        entries = [model_entry(peer, name) for peer in context.peers for name in peer.config.served_model_names]
        page = {"first_id": entries[0]["id"], "last_id": entries[-1]["id"], "has_more": False}  # Anthropic's spelling
        return {"object": "list", "data": entries, **page}

    @routes.get("/v1/models/{name:path}", responses={404: ERROR_RESPONSES[404]})
    async def model(name: str) -> Json:
        """One model."""
        return model_entry(context.named(name), name)


def _add_monitoring_routes(routes: APIRouter, context: ServerContext) -> None:
    add_health_routes(routes, context, {503: ERROR_RESPONSES[503]})

    @routes.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(context.metrics.exposition(), media_type=PROMETHEUS_TYPE)


def model_entry(context: ServerContext, name: str) -> Json:
    """A model as /v1/models lists it, with the fields that Anthropic's clients read too."""
    num_draft_tokens = context.config.num_draft_tokens
    details = {
        "methods": list(context.engine.methods),
        "num_draft_tokens": "auto" if num_draft_tokens is None else num_draft_tokens,
        "max_model_len": context.requests.max_model_len,
        "sampling_defaults": context.config.sampling_defaults,
        "dtype": context.engine.info.dtype,
        "near_tie_logprob": near_tie_logprob(context.engine.info.dtype),
    }
    base, lora = context.config.served_model_names[0], context.config.lora_of(name)
    entry = {"id": name, "object": "model", "created": STARTED, "owned_by": "paceline"}
    entry |= {"type": "model", "display_name": name, "created_at": STARTED_AT}
    entry |= {"root": base, "parent": base if lora else None, "max_model_len": context.requests.max_model_len}
    return {**entry, "x_paceline": details}


async def chat_response(
    context: ServerContext, request: Request, body: ChatRequest, shape: ApiShape | None = None
) -> Response:
    """The answer to chat messages. shape: that of another API, whose body was translated into this one."""
    ignored = context.extra_fields.ignored(body)
    task = await tokenized_for(context, request, context.requests.chat, body)
    response_format = ChatFormat(context.formatter)
    return add_header(await respond(context, request, task, response_format, shape or ApiShape()), ignored)


async def completion_response(
    context: ServerContext,
    request: Request,
    body: CompletionRequest,
    shape: ApiShape | None = None,
    default_tokens: int = COMPLETION_MAX_TOKENS,
    *,
    reads_prompt: bool = False,
) -> Response:
    """The continuation of a prompt. shape: as of a chat; the others: as RequestBuilder.completion has them."""
    ignored = context.extra_fields.ignored(body)
    build = partial(context.requests.completion, default_tokens=default_tokens, reads_prompt=reads_prompt)
    task = await tokenized_for(context, request, build, body)
    response_format = CompletionFormat(context.formatter)
    return add_header(await respond(context, request, task, response_format, shape or ApiShape()), ignored)


async def tokenized_for(
    context: ServerContext, request: Request, build: Callable[[Body], Result], body: Body
) -> Result:
    """Run the tokenizer for a request that could be admitted and whose client is there: others would delay these."""
    context.admission.check(request.scope[KEY_SCOPE])
    return await while_connected(request, context.tokenized(build, body))


async def respond(
    context: ServerContext, request: Request, task: CompletionTask, response_format: ResponseFormat, shape: ApiShape
) -> Response:
    """The response to one request, whole or as a stream. Its admission ends with the last byte."""
    response = ResponseBuilder(response_format, task, task.model or context.config.served_model_names[0])
    shape.prompt_tokens, shape.prompt_ids = task.prompt_tokens, task.choices[0].request.prompt
    log_fields = request.scope[LOG_FIELDS]
    log_fields |= _request_fields(context, task, response)
    with ExitStack() as admission:
        admission.enter_context(context.admission.admit(request.scope[KEY_SCOPE], len(task.choices)))
        deltas = context.generate(task, request.scope[KEY_SCOPE])
        if not task.stream:
            document = await while_connected(request, response.whole(deltas))
            log_fields |= response.log_fields()
            shape.first_token = response.first_token
            return Document(shape.whole(document))
        chunks = shape.chunks(response.chunks(deltas))
        first = await first_chunk(request, chunks, context.config.limits.ping_interval)
        stream_admission = admission.pop_all()

    def on_finish(error: ApiError | None) -> None:
        stream_admission.close()
        log_fields.update(response.log_fields(), **({"status": error.status} if error else {}))

    limits = context.config.limits
    return EventStream(first, chunks, shape, limits.stall_timeout, on_finish, limits.ping_interval)


def _request_fields(context: ServerContext, task: CompletionTask, response: ResponseBuilder) -> Json:
    """What the access log says of a request. Prompts only where the server was asked to log them."""
    fields: Json = {
        "model": context.name,
        "response_id": response.id,
        "choices": len(task.choices),
        "prompt_tokens": task.prompt_tokens,
        "stream": task.stream,
    }
    if context.config.log_prompts:
        fields["prompts"] = [context.formatter.prompt_text(choice.request.prompt) for choice in task.choices]
    return fields
