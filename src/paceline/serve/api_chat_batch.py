"""Several conversations in one request: vLLM's /v1/chat/completions/batch, one choice (or n of them) for each."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from paceline.serve.api_chat import checked
from paceline.serve.api_shape import ApiShape
from paceline.serve.context import ServerContext
from paceline.serve.errors import ApiError
from paceline.serve.extra_fields import add_header
from paceline.serve.requests import CompletionTask
from paceline.serve.responses import ChatFormat
from paceline.serve.routes import ERROR_RESPONSES, respond, tokenized_for
from paceline.serve.schema import ChatRequest, LenientModel

Conversation = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=4096)]


class BatchChatRequest(LenientModel):
    """Body of /v1/chat/completions/batch: that of a chat, with several conversations in place of one."""

    messages: Annotated[list[Conversation], Field(min_length=1, max_length=128)]
    stream: bool | None = None

    @property
    def chats(self) -> list[ChatRequest]:
        """A chat request for each conversation."""
        fields = self.model_dump(exclude_unset=True, exclude={"messages"})
        return [checked(ChatRequest, {**fields, "messages": messages}) for messages in self.messages]


def add_chat_batch_routes(routes: APIRouter, context: ServerContext) -> None:
    @routes.post("/v1/chat/completions/batch", responses=ERROR_RESPONSES, response_model=None)
    async def batch_chat_completions(request: Request, body: BatchChatRequest) -> Response:
        """The answers to several conversations, in their order."""
        if body.stream:
            raise ApiError(400, "a batch is not streamed; leave out stream", param="stream")
        chats = body.chats
        ignored = list(dict.fromkeys(name for chat in chats for name in context.extra_fields.ignored(chat)))
        tasks = [await tokenized_for(context, request, context.requests.chat, chat) for chat in chats]
        context.requests.check_num_choices(sum(len(task.choices) for task in tasks))
        response = await respond(context, request, joined(tasks), ChatFormat(context.formatter), ApiShape())
        return add_header(response, ignored)


def joined(tasks: list[CompletionTask]) -> CompletionTask:
    """One task with the choices of all."""
    choices = [choice for task in tasks for choice in task.choices]
    return replace(tasks[0], choices=choices, prompt_tokens=sum(task.prompt_tokens for task in tasks))
