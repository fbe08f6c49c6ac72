"""Ollama's routes, so that its clients work: chats, generations, and what it tells about models."""

from __future__ import annotations

import hashlib
from typing import Any

from fastapi import APIRouter, Request, Response

from paceline import __version__
from paceline.serve.api_chat import chat_request, checked, given
from paceline.serve.api_ollama_input import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    chat_fields,
    chat_messages,
    sampling_fields,
    served_name,
)
from paceline.serve.api_ollama_output import OllamaShape, timestamp
from paceline.serve.api_shape import Document, Json
from paceline.serve.context import ServerContext
from paceline.serve.errors import ApiError
from paceline.serve.routes import ERROR_RESPONSES, STARTED, chat_response, completion_response
from paceline.serve.schema import CompletionRequest, LenientModel

# What manages models: this server has the one it was started with.
MODEL_ROUTES = ("pull", "push", "create", "copy", "delete")
NEVER = "2999-12-31T00:00:00Z"  # when the model is unloaded


class OllamaModelRequest(LenientModel):
    """Body of /api/show. name: an older spelling of model."""

    model: str | None = None
    name: str | None = None


def add_ollama_routes(routes: APIRouter, context: ServerContext) -> None:
    _add_generation_routes(routes, context)
    _add_model_routes(routes, context)
    for name in MODEL_ROUTES:
        for method in ("POST", "DELETE") if name == "delete" else ("POST",):
            routes.add_api_route(f"/api/{name}", refuse_model_change, methods=[method], include_in_schema=False)


async def refuse_model_change() -> None:
    """Models are not managed over HTTP."""
    raise ApiError(501, "this server has the model it was started with; start `paceline serve MODEL` for another")


def _add_generation_routes(routes: APIRouter, context: ServerContext) -> None:
    names = context.config.served_model_names

    @routes.post("/api/chat", responses=ERROR_RESPONSES, response_model=None)
    async def ollama_chat(request: Request, body: OllamaChatRequest) -> Response:
        """The answer to chat messages, as one JSON document a line unless `stream` is false."""
        if not body.messages:
            return _loaded(context, body.model, is_chat=True)
        fields = sampling_fields(body, names) | chat_fields(body)
        fields |= {"messages": chat_messages(body.messages)} | given(tools=body.tools)
        return await chat_response(context, request, chat_request(fields), OllamaShape(body.model, is_chat=True))

    @routes.post("/api/generate", responses=ERROR_RESPONSES, response_model=None)
    async def ollama_generate(request: Request, body: OllamaGenerateRequest) -> Response:
        """The answer to a prompt, through the chat template unless `raw` is true."""
        _check_generate(body)
        if not body.prompt:
            return _loaded(context, body.model, is_chat=False)
        fields, shape = sampling_fields(body, names), OllamaShape(body.model, is_chat=False)
        if body.raw or body.suffix:
            completion = checked(CompletionRequest, fields | given(prompt=body.prompt, suffix=body.suffix))
            default_tokens = context.config.limits.chat_max_tokens
            return await completion_response(context, request, completion, shape, default_tokens)
        system = [{"role": "system", "content": body.system}] if body.system else []
        messages = [*system, {"role": "user", "content": body.prompt}]
        chat = chat_request(fields | chat_fields(body) | {"messages": messages})
        return await chat_response(context, request, chat, shape)


def _check_generate(body: OllamaGenerateRequest) -> None:
    if body.images:
        raise ApiError(400, "images are not read; this server reads text", param="images")
    if body.template:
        raise ApiError(400, "the chat template is the model's; send raw: true with the whole prompt", param="template")
    if body.context:
        raise ApiError(400, "context is not supported; send the conversation to /api/chat", param="context")


def _loaded(context: ServerContext, model: str, *, is_chat: bool) -> Response:
    """The answer to a request without a prompt, by which clients load a model: it is loaded."""
    context.requests.check_model(served_name(model, context.config.served_model_names))
    content: Json = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    return Document({"model": model, "created_at": timestamp(), **content, "done": True, "done_reason": "load"})


def _add_model_routes(routes: APIRouter, context: ServerContext) -> None:
    names = context.config.served_model_names

    def served() -> list[tuple[ServerContext, str]]:
        return [(peer, name) for peer in context.peers for name in peer.config.served_model_names]

    @routes.get("/api/tags")
    async def ollama_tags() -> Json:
        """The models that are served, once for each of their names."""
        return {"models": [model_entry(peer, name) for peer, name in served()]}

    @routes.get("/api/ps")
    async def ollama_ps() -> Json:
        """The models in memory, which are those that are served."""
        return {"models": [loaded_entry(peer, name) for peer, name in served()]}

    @routes.get("/api/version")
    async def ollama_version() -> Json:
        """The version of this server."""
        return {"version": __version__}

    @routes.post("/api/show", responses=ERROR_RESPONSES)
    async def ollama_show(body: OllamaModelRequest) -> Json:
        """What is known of a model."""
        name = body.model or body.name or ""
        context.requests.check_model(served_name(name, names))
        return model_description(context)


def model_details(context: ServerContext) -> Json:
    info = context.engine.info
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": info.name,
        "families": [info.name],
        "parameter_size": "",
        "quantization_level": info.dtype,
    }


def model_entry(context: ServerContext, name: str) -> Json:
    """A model as /api/tags lists it. The digest names it; its files are not read for it."""
    digest = hashlib.sha256(f"{context.engine.info.name}\n{name}".encode("utf-8", "replace")).hexdigest()
    names: dict[str, Any] = {"name": name, "model": name, "modified_at": timestamp(STARTED)}
    return {**names, "size": 0, "digest": digest, "details": model_details(context)}


def loaded_entry(context: ServerContext, name: str) -> Json:
    """A model as /api/ps lists it."""
    limit = context.requests.max_model_len
    return {**model_entry(context, name), "expires_at": NEVER, "size_vram": 0, "context_length": limit}


def model_description(context: ServerContext) -> Json:
    """A model as /api/show describes it."""
    info, vocabulary = context.engine.info, context.requests.vocabulary
    defaults = context.config.sampling_defaults
    architecture = "paceline"
    capabilities = ["completion", *(["insert"] if context.requests.middle.is_supported else [])]
    return {
        "modelfile": f"FROM {info.name}",
        "parameters": "\n".join(f"{name} {value}" for name, value in defaults.items()),
        "template": vocabulary.chat_template,
        "details": model_details(context),
        "model_info": {
            "general.architecture": architecture,
            "general.basename": info.name,
            f"{architecture}.block_count": info.num_layers,
            f"{architecture}.context_length": context.requests.max_model_len,
            f"{architecture}.embedding_length": info.hidden_size,
            f"{architecture}.vocab_size": info.vocab_size,
        },
        "capabilities": [*capabilities, *(["tools"] if "tools" in vocabulary.chat_template else [])],
        "modified_at": timestamp(STARTED),
    }
