"""Anthropic's Messages API."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from paceline.serve.api_chat import chat_request
from paceline.serve.api_messages_input import CountTokensRequest, MessagesRequest, chat_document, prompt_document
from paceline.serve.api_messages_output import MessagesShape
from paceline.serve.api_shape import Json
from paceline.serve.context import ServerContext
from paceline.serve.routes import ERROR_RESPONSES, chat_response
from paceline.serve.streaming import while_connected


def add_messages_routes(routes: APIRouter, context: ServerContext) -> None:
    @routes.post("/v1/messages", responses=ERROR_RESPONSES, response_model=None)
    async def create_message(request: Request, body: MessagesRequest) -> Response:
        """The next message of a conversation, as Anthropic's clients ask for it."""
        chat = chat_request(chat_document(body))
        return await chat_response(context, request, chat, MessagesShape())

    @routes.post("/v1/messages/count_tokens", responses=ERROR_RESPONSES, response_model=None)
    async def count_message_tokens(request: Request, body: CountTokensRequest) -> Json:
        """How many tokens a conversation has."""
        chat = chat_request(prompt_document(body))
        context.requests.check_model(chat.model)
        tokens = await while_connected(request, context.tokenized(context.requests.chat_prompt, chat))
        return {"input_tokens": len(tokens)}
