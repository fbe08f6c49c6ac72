"""The routes of other APIs, which clients expect beside OpenAI's completions."""

from __future__ import annotations

from fastapi import APIRouter

from paceline.serve.api_chat_batch import add_chat_batch_routes
from paceline.serve.api_embeddings import add_embeddings_routes
from paceline.serve.api_invocations import add_invocations_routes
from paceline.serve.api_llama_cpp import add_llama_cpp_routes
from paceline.serve.api_messages import add_messages_routes
from paceline.serve.api_ollama import add_ollama_routes
from paceline.serve.api_responses import add_responses_routes
from paceline.serve.api_responses_store import ResponseStore
from paceline.serve.api_server import add_server_routes
from paceline.serve.api_tokenizer import add_tokenizer_routes
from paceline.serve.context import ServerContext
from paceline.serve.limits import limited_route

FAMILIES = (
    add_messages_routes,
    add_ollama_routes,
    add_embeddings_routes,
    add_tokenizer_routes,
    add_llama_cpp_routes,
    add_chat_batch_routes,
    add_invocations_routes,
    add_server_routes,
)


def api_router(context: ServerContext, responses: ResponseStore) -> APIRouter:
    """All of them, over one model. responses: the store of the server, for all of its models."""
    routes = APIRouter(route_class=limited_route(context.config.limits))
    add_responses_routes(routes, context, responses)
    for add_routes in FAMILIES:
        add_routes(routes, context)
    return routes
