"""OpenAI's routes and a few of our own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from paceline.core.protocols import Engine
from paceline.serve.access_log import LOG, NOTES
from paceline.serve.errors import ApiError, as_api_error
from paceline.serve.limits import AdmissionControl, strict_route
from paceline.serve.metrics import Metrics
from paceline.serve.requests import Desk, Job
from paceline.serve.responses import ChatForm, CompletionForm, Form, Json, ResponseBuilder, TokenFormatter
from paceline.serve.schema import ChatRequest, CompletionRequest, TokenizeRequest
from paceline.serve.settings import ServerConfig
from paceline.serve.streaming import ChoiceDelta, EventStream, together, while_wanted

Found = TypeVar("Found")
ERROR: dict[int | str, dict[str, Any]] = {
    status: {
        "description": words,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
    }
    for status, words in {
        400: "The request cannot be honoured; the message says why",
        401: "A key is needed",
        404: "No such model",
        408: "It took too long",
        413: "The body is too large",
        415: "The body is not JSON",
        429: "Too much at a time; see Retry-After",
        500: "The model failed; other requests are not affected",
        503: "The server is shutting down",
    }.items()
}


@dataclass(frozen=True, slots=True)
class ServerContext:
    """Everything the routes work with."""

    engine: Engine
    desk: Desk
    words: TokenFormatter
    gate: AdmissionControl
    metrics: Metrics
    settings: ServerConfig
    reader: ThreadPoolExecutor  # one thread: tokenizers are not made to be shared

    async def read(self, work: Callable[[Any], Found], body: Any) -> Found:
        """Templates and tokens of a long prompt take a while; others are served meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self.reader, work, body)


def router(context: ServerContext) -> APIRouter:
    """All routes of one server."""
    routes = APIRouter(route_class=strict_route(context.settings.limits))

    @routes.post("/v1/chat/completions", responses=ERROR, response_model=None)
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """The answer to chat messages."""
        return await answer(context, request, await context.read(context.desk.chat, body), ChatForm(context.words))

    @routes.post("/v1/completions", responses=ERROR, response_model=None)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """The continuation of a text."""
        return await answer(
            context, request, await context.read(context.desk.completion, body), CompletionForm(context.words)
        )

    @routes.post("/tokenize", responses=ERROR)
    async def tokenize(body: TokenizeRequest) -> Json:
        """Token ids of a text, or of chat messages through the model's template."""
        context.desk.check_model(body.model)
        tokens = await context.read(context.desk.tokens, body)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": context.engine.info.max_seq_len}

    @routes.get("/v1/models")
    async def models() -> Json:
        """The models that are served: one, under one or more names."""
        return {"object": "list", "data": [model_card(context, name) for name in context.settings.names]}

    @routes.get("/v1/models/{name:path}", responses={404: ERROR[404]})
    async def model(name: str) -> Json:
        """One model."""
        context.desk.check_model(name)
        return model_card(context, name)

    @routes.get("/health", responses={503: ERROR[503]})
    async def health() -> JSONResponse:
        """Whether requests are taken."""
        load = context.engine.stats()
        state = {"status": "closing" if context.gate.closing else "ok", "running": load.running, "waiting": load.waiting}
        return JSONResponse(state, 503 if context.gate.closing else 200)

    @routes.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Numbers for Prometheus."""
        return Response(context.metrics.shown(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return routes


STARTED = int(time.time())


def model_card(context: ServerContext, name: str) -> Json:
    info = context.engine.info
    about = {
        "methods": list(context.engine.methods),
        "num_draft_tokens": "auto" if context.settings.num_draft_tokens is None else context.settings.num_draft_tokens,
        "max_seq_len": info.max_seq_len,
    }
    return {"id": name, "object": "model", "created": STARTED, "owned_by": "paceline", "x_paceline": about}


async def answer(context: ServerContext, request: Request, job: Job, form: Form) -> Response:
    """Write what was asked for, whole or as a stream. The place in the queue is held until the last byte."""
    response = ResponseBuilder(form, job, context.settings.names[0])
    notes = request.scope[NOTES]
    notes |= {"reply": response.id, "texts": len(job.choices), "prompt_tokens": job.prompt_tokens, "stream": job.stream}
    if context.settings.log_prompts:
        notes["prompts"] = [context.words.text(choice.request.prompt) for choice in job.choices]
    with ExitStack() as held:
        held.enter_context(context.gate.admit(request.scope["paceline_key"], len(job.choices)))
        streams = [context.metrics.timed(context.engine.generate(choice.request)) for choice in job.choices]
        outputs = together(streams, context.settings.limits.seconds)
        if not job.stream:
            await while_wanted(request, _collect(outputs, response))
            _note(notes, response)
            return JSONResponse(response.whole())
        # The first piece is awaited before the status is sent, so that what fails at once fails with its own status.
        first = await while_wanted(request, _first(outputs))
        places = held.pop_all()

    def finished(error: ApiError | None) -> None:
        places.close()
        _note(notes, response)
        if error is not None:
            notes["status"] = error.status

    return EventStream(_events(first, outputs, response, job), context.settings.limits.stall, finished)


async def _collect(outputs: AsyncGenerator[ChoiceDelta, None], response: ResponseBuilder) -> None:
    async with aclosing(outputs):
        async for numbered in outputs:
            response.texts[numbered.index].add(numbered.piece)


async def _first(outputs: AsyncGenerator[ChoiceDelta, None]) -> ChoiceDelta:
    try:
        return await anext(outputs)
    except BaseException:
        await outputs.aclose()
        raise


async def _events(
    first: ChoiceDelta, outputs: AsyncGenerator[ChoiceDelta, None], response: ResponseBuilder, job: Job
) -> AsyncGenerator[Json, None]:
    """The chunks of a stream. Errors on the way become ApiErrors, for the stream to show."""
    async with aclosing(outputs):
        for index in range(len(job.choices)):
            yield response.opening(index)
        try:
            for chunk in _chunks(first, response):
                yield chunk
            async for numbered in outputs:
                for chunk in _chunks(numbered, response):
                    yield chunk
        except Exception as error:  # told to the client as the stream's last event
            shown = as_api_error(error)
            if shown.status >= 500:
                LOG.error("failed", exc_info=error)
            raise shown from error
        if job.include_usage:
            yield response.last()


def _chunks(numbered: ChoiceDelta, response: ResponseBuilder) -> list[Json]:
    text, output = response.texts[numbered.index], numbered.piece
    text.add(output)
    chunks = [response.chunk(numbered.index, output)] if output.text or output.logprobs or response.figures else []
    return [*chunks, response.closing(numbered.index)] if output.finish_reason else chunks


def _note(notes: dict[str, Any], response: ResponseBuilder) -> None:
    """Figures for the log. Neither prompt nor answer."""
    for name in ("new_tokens", "drafted", "accepted"):
        notes[name] = sum(getattr(text.stats, name) for text in response.texts)
