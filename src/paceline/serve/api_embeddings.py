"""Embeddings: OpenAI's /v1/embeddings and Ollama's /api/embed."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
import time
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Field

from paceline.errors import ContextLengthExceeded, PromptError
from paceline.serve.api_chat import part_text
from paceline.serve.api_ollama_input import served_name
from paceline.serve.api_shape import Document, Json
from paceline.serve.auth import KEY_SCOPE
from paceline.serve.context import ServerContext
from paceline.serve.errors import ApiError
from paceline.serve.extra_fields import add_header
from paceline.serve.routes import ERROR_RESPONSES, tokenized_for
from paceline.serve.schema import LenientModel, TokenIds
from paceline.serve.streaming import while_connected

MAX_INPUTS = 2048
InputObject = dict[str, Any]  # {"prompt_string": …} or {"content": [parts]}, as llama.cpp takes them
Input = str | TokenIds | InputObject
Inputs = Input | Annotated[list[Input], Field(min_length=1, max_length=MAX_INPUTS)]
Dimensions = Annotated[int, Field(ge=1, le=1 << 20)]


class EmbeddingsRequest(LenientModel):
    """Body of /v1/embeddings."""

    model: str | None = None
    input: Inputs
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=1 << 31)] | None = None
    user: str | None = None


class OllamaEmbedRequest(LenientModel):
    """Body of /api/embed."""

    model: str
    input: str | Annotated[list[str], Field(max_length=MAX_INPUTS)]
    truncate: bool | None = None
    dimensions: Dimensions | None = None


class OllamaEmbeddingsRequest(LenientModel):
    """Body of /api/embeddings, the older of Ollama's two."""

    model: str
    prompt: str


class Embeddings:
    """Vectors of texts, by the pooling that the server was started with."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context

    def tokens(self, inputs: list[Input], keep: int | None) -> list[list[int]]:
        """Token ids of each input. keep: only so many of its first tokens; -1: as many as fit."""
        limit = self._context.requests.max_model_len
        prompts = [self._prompt(entry) for entry in inputs]
        if keep is not None:
            return [token_ids[: limit if keep == -1 else keep] for token_ids in prompts]
        longest = max(map(len, prompts))
        if longest > limit:
            raise ContextLengthExceeded(f"the input has {longest} tokens, too large for the {limit} of this model")
        return prompts

    def _prompt(self, entry: Input) -> list[int]:
        if isinstance(entry, list):
            return entry
        text = entry if isinstance(entry, str) else object_text(entry)
        if not text:
            raise PromptError("an input is empty; there is nothing to embed")
        return self._context.engine.tokenizer.encode(text)

    async def vectors(self, request: Request, prompts: list[list[int]]) -> list[list[float]]:
        """One after the other, so that running sequences take their steps between two of them. Raises ApiError 408."""
        seconds = self._context.config.limits.request_timeout
        with self._context.admission.admit(request.scope[KEY_SCOPE], 1):
            try:
                async with asyncio.timeout(seconds):
                    return await while_connected(request, self._computed(prompts))
            except TimeoutError:
                raise ApiError(408, f"the request took longer than {seconds:g} seconds", code="timeout") from None

    async def _computed(self, prompts: list[list[int]]) -> list[list[float]]:
        embed, pooling = self._context.engine.embed, self._context.config.pooling
        return [await embed(token_ids, pooling) for token_ids in prompts]


def object_text(entry: InputObject) -> str:
    if isinstance(entry.get("prompt_string"), str):
        return str(entry["prompt_string"])
    content = entry.get("content")
    if not isinstance(content, list):
        raise ApiError(400, "an input object has a prompt_string, or content with a list of parts", param="input")
    return "".join(part_text(part, "input.content") for part in content)


def shortened(vector: list[float], dimensions: int | None) -> list[float]:
    """The first dimensions, of length 1 again."""
    if dimensions is None:
        return vector
    if dimensions > len(vector):
        raise ApiError(400, f"dimensions may be {len(vector)} at most", param="dimensions")
    short = vector[:dimensions]
    length = math.sqrt(math.fsum(number * number for number in short)) or 1.0
    return [number / length for number in short]


def encoded(vector: list[float], encoding_format: str | None) -> list[float] | str:
    if encoding_format != "base64":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def input_list(inputs: Any) -> list[Input]:
    """A single string, object or list of token ids is a list of one."""
    is_single = not isinstance(inputs, list) or isinstance(inputs[0], int)
    return [inputs] if is_single else inputs


def add_embeddings_routes(routes: APIRouter, context: ServerContext) -> None:
    embeddings = Embeddings(context)

    @routes.post("/v1/embeddings", responses=ERROR_RESPONSES, response_model=None)
    @routes.post("/embeddings", include_in_schema=False, response_model=None)
    async def create_embeddings(request: Request, body: EmbeddingsRequest) -> Response:
        """The last hidden states of texts, each pooled into one vector of length 1."""
        ignored = context.extra_fields.ignored(body)
        context.requests.check_model(body.model)
        inputs, keep = input_list(body.input), body.truncate_prompt_tokens
        prompts = await tokenized_for(context, request, partial(embeddings.tokens, keep=keep), inputs)
        vectors = [shortened(vector, body.dimensions) for vector in await embeddings.vectors(request, prompts)]
        data = [
            {"object": "embedding", "index": index, "embedding": encoded(vector, body.encoding_format)}
            for index, vector in enumerate(vectors)
        ]
        num_tokens = sum(map(len, prompts))
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        model = body.model or context.config.served_model_names[0]
        return add_header(Document({"object": "list", "data": data, "model": model, "usage": usage}), ignored)

    _add_ollama_routes(routes, context, embeddings)


def _add_ollama_routes(routes: APIRouter, context: ServerContext, embeddings: Embeddings) -> None:
    names = context.config.served_model_names

    @routes.post("/api/embed", responses=ERROR_RESPONSES, response_model=None)
    async def ollama_embed(request: Request, body: OllamaEmbedRequest) -> Response:
        """The same vectors for Ollama's clients. Long inputs are cut unless `truncate` is false."""
        started = time.perf_counter_ns()
        context.requests.check_model(served_name(body.model, names))
        inputs: list[Input] = [body.input] if isinstance(body.input, str) else [*body.input]
        keep = None if body.truncate is False else -1
        tokens = partial(embeddings.tokens, keep=keep)
        prompts = await tokenized_for(context, request, tokens, inputs) if inputs else []
        vectors = [shortened(vector, body.dimensions) for vector in await embeddings.vectors(request, prompts)]
        seconds: Json = {"total_duration": time.perf_counter_ns() - started, "load_duration": 0}
        counts = {**seconds, "prompt_eval_count": sum(map(len, prompts))}
        return Document({"model": body.model, "embeddings": vectors, **counts})

    @routes.post("/api/embeddings", responses=ERROR_RESPONSES, response_model=None)
    async def ollama_embeddings(request: Request, body: OllamaEmbeddingsRequest) -> Response:
        """One vector, in Ollama's older spelling."""
        context.requests.check_model(served_name(body.model, names))
        prompts = await tokenized_for(context, request, partial(embeddings.tokens, keep=-1), [body.prompt])
        return Document({"embedding": (await embeddings.vectors(request, prompts))[0]})
