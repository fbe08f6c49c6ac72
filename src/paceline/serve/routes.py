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
from paceline.serve.errors import ApiError, as_api_error
from paceline.serve.limits import Gate, strict_route
from paceline.serve.logs import LOG, NOTES
from paceline.serve.metrics import Metrics, load_of
from paceline.serve.replies import ChatForm, CompletionForm, Form, Json, Letter, TokenWords
from paceline.serve.schema import ChatRequest, CompletionRequest, TokenizeRequest
from paceline.serve.settings import ServeSettings
from paceline.serve.streaming import EventStream, Numbered, together, while_wanted
from paceline.serve.translate import Desk, Job

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
class Office:
    """Everything the routes work with."""

    engine: Engine
    desk: Desk
    words: TokenWords
    gate: Gate
    metrics: Metrics
    settings: ServeSettings
    reader: ThreadPoolExecutor  # one thread: tokenizers are not made to be shared

    async def read(self, work: Callable[[Any], Found], body: Any) -> Found:
        """Templates and tokens of a long prompt take a while; others are served meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self.reader, work, body)


def router(office: Office) -> APIRouter:
    """All routes of one server."""
    routes = APIRouter(route_class=strict_route(office.settings.limits))

    @routes.post("/v1/chat/completions", responses=ERROR, response_model=None)
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """The answer to chat messages."""
        return await answer(office, request, await office.read(office.desk.chat, body), ChatForm(office.words))

    @routes.post("/v1/completions", responses=ERROR, response_model=None)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """The continuation of a text."""
        return await answer(
            office, request, await office.read(office.desk.completion, body), CompletionForm(office.words)
        )

    @routes.post("/tokenize", responses=ERROR)
    async def tokenize(body: TokenizeRequest) -> Json:
        """Token ids of a text, or of chat messages through the model's template."""
        office.desk.check_model(body.model)
        tokens = await office.read(office.desk.tokens, body)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": office.engine.card.longest_text}

    @routes.get("/v1/models")
    async def models() -> Json:
        """The models that are served: one, under one or more names."""
        return {"object": "list", "data": [model_card(office, name) for name in office.settings.names]}

    @routes.get("/v1/models/{name:path}", responses={404: ERROR[404]})
    async def model(name: str) -> Json:
        """One model."""
        office.desk.check_model(name)
        return model_card(office, name)

    @routes.get("/health", responses={503: ERROR[503]})
    async def health() -> JSONResponse:
        """Whether requests are taken."""
        load = load_of(office.engine)
        state = {"status": "closing" if office.gate.closing else "ok", "running": load.running, "waiting": load.waiting}
        return JSONResponse(state, 503 if office.gate.closing else 200)

    @routes.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Numbers for Prometheus."""
        return Response(office.metrics.shown(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return routes


STARTED = int(time.time())


def model_card(office: Office, name: str) -> Json:
    card = office.engine.card
    about = {
        "methods": list(getattr(office.engine, "methods", ())),
        "draft_tokens": "auto" if office.settings.draft_tokens is None else office.settings.draft_tokens,
        "longest_text": card.longest_text,
    }
    return {"id": name, "object": "model", "created": STARTED, "owned_by": "paceline", "x_paceline": about}


async def answer(office: Office, request: Request, job: Job, form: Form) -> Response:
    """Write what was asked for, whole or as a stream. The place in the queue is held until the last byte."""
    letter = Letter(form, job, office.settings.names[0])
    notes = request.scope[NOTES]
    notes |= {"reply": letter.id, "texts": len(job.choices), "prompt_tokens": job.prompt_tokens, "stream": job.stream}
    if office.settings.log_prompts:
        notes["prompts"] = [office.words.text(choice.request.prompt) for choice in job.choices]
    with ExitStack() as held:
        held.enter_context(office.gate.admit(request.scope["paceline_key"], len(job.choices)))
        streams = [office.metrics.timed(office.engine.generate(choice.request)) for choice in job.choices]
        pieces = together(streams, office.settings.limits.seconds)
        if not job.stream:
            await while_wanted(request, _collect(pieces, letter))
            _note(notes, letter)
            return JSONResponse(letter.whole())
        # The first piece is awaited before the status is sent, so that what fails at once fails with its own status.
        first = await while_wanted(request, _first(pieces))
        places = held.pop_all()

    def finished(error: ApiError | None) -> None:
        places.close()
        _note(notes, letter)
        if error is not None:
            notes["status"] = error.status

    return EventStream(_events(first, pieces, letter, job), office.settings.limits.stall, finished)


async def _collect(pieces: AsyncGenerator[Numbered, None], letter: Letter) -> None:
    async with aclosing(pieces):
        async for numbered in pieces:
            letter.texts[numbered.index].add(numbered.piece)


async def _first(pieces: AsyncGenerator[Numbered, None]) -> Numbered:
    try:
        return await anext(pieces)
    except BaseException:
        await pieces.aclose()
        raise


async def _events(
    first: Numbered, pieces: AsyncGenerator[Numbered, None], letter: Letter, job: Job
) -> AsyncGenerator[Json, None]:
    """The chunks of a stream. Errors on the way become ApiErrors, for the stream to show."""
    async with aclosing(pieces):
        for index in range(len(job.choices)):
            yield letter.opening(index)
        try:
            for chunk in _chunks(first, letter):
                yield chunk
            async for numbered in pieces:
                for chunk in _chunks(numbered, letter):
                    yield chunk
        except Exception as error:  # told to the client as the stream's last event
            shown = as_api_error(error)
            if shown.status >= 500:
                LOG.error("failed", exc_info=error)
            raise shown from error
        if job.include_usage:
            yield letter.last()


def _chunks(numbered: Numbered, letter: Letter) -> list[Json]:
    text, piece = letter.texts[numbered.index], numbered.piece
    text.add(piece)
    chunks = [letter.chunk(numbered.index, piece)] if piece.text or piece.logprobs or letter.figures else []
    return [*chunks, letter.closing(numbered.index)] if piece.finish_reason else chunks


def _note(notes: dict[str, Any], letter: Letter) -> None:
    """Figures for the log. Neither prompt nor answer."""
    for name in ("new_tokens", "drafted", "accepted"):
        notes[name] = sum(getattr(text.tally, name) for text in letter.texts)
