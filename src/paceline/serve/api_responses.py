"""OpenAI's Responses API: create, continue, read, list the input of, cancel and delete responses."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Literal

from fastapi import APIRouter, Query, Request, Response

from paceline.serve.api_chat import chat_request
from paceline.serve.api_responses_input import ResponsesRequest, chat_document, shown_fields
from paceline.serve.api_responses_output import FAILED, RawMessages, ResponseDocument, ResponsesShape, new_id
from paceline.serve.api_responses_store import ResponseStore, StoredResponse
from paceline.serve.api_shape import Document, Json
from paceline.serve.auth import KEY_SCOPE
from paceline.serve.context import ServerContext
from paceline.serve.errors import ApiError, as_api_error, log_failure
from paceline.serve.extra_fields import add_header
from paceline.serve.responses import ChatFormat, ResponseBuilder
from paceline.serve.routes import ERROR_RESPONSES, chat_response, tokenized_for
from paceline.serve.schema import ChatRequest
from paceline.serve.streaming import while_connected

QUEUED, CANCELLED = "queued", "cancelled"
MAX_LISTED = 100


class ResponsesApi:
    """What the routes of the Responses API do."""

    def __init__(self, context: ServerContext, store: ResponseStore) -> None:
        self._context, self.store = context, store

    async def create(self, request: Request, body: ResponsesRequest) -> Response:
        """A response, whole, as a stream, or in the background."""
        owner, inputs = request.scope[KEY_SCOPE], body.items
        history = self._history(body, owner)
        chat = chat_request(chat_document(body, history + inputs))

        def keep(document: Json) -> None:
            if body.is_stored:
                items = [*history, *inputs, *document["output"]]
                self.store.put(StoredResponse(owner, document, inputs, items))

        raw = RawMessages(self._context.formatter.prompt_text) if body.enable_response_messages else None
        response = ResponseDocument(new_id("resp"), shown_fields(body), keep, raw)
        if body.background:
            stored = StoredResponse(owner, response.document(QUEUED), inputs)
            return await self._in_background(request, stored, chat, response)
        return await chat_response(self._context, request, chat, ResponsesShape(response))

    def _history(self, body: ResponsesRequest, owner: str) -> list[Json]:
        """The items of the conversation that a request continues."""
        if body.previous_response_id is None:
            return []
        previous = self.store.get(body.previous_response_id, owner, "previous_response_id")
        if not previous.history:
            message = f"the previous response is {previous.document['status']}; only a finished one can be continued"
            raise ApiError(400, message, param="previous_response_id")
        return previous.history

    async def num_input_tokens(self, request: Request, body: ResponsesRequest) -> int:
        history = self._history(body, request.scope[KEY_SCOPE])
        chat = chat_request(chat_document(body, history + body.items))
        return len(await while_connected(request, self._context.tokenized(self._context.requests.chat_prompt, chat)))

    def cancel(self, response_id: str, owner: str) -> Json:
        """Stop a response that runs in the background; harmless for one that has ended."""
        stored = self.store.get(response_id, owner)
        if not stored.document["background"]:
            raise ApiError(400, "Cannot cancel a synchronous response.", param="response_id")
        if stored.work is not None and not stored.work.done():
            stored.work.cancel()
            stored.document = {**stored.document, "status": CANCELLED}
            self.store.update(stored)
        return stored.document

    # --- in the background --------------------------------------------------------------------------------------------

    async def _in_background(
        self, request: Request, stored: StoredResponse, chat: ChatRequest, response: ResponseDocument
    ) -> Response:
        """Start the response and return at once. It is admitted first, so that a full queue is told to the client."""
        context, ignored = self._context, self._context.extra_fields.ignored(chat)
        task = await tokenized_for(context, request, context.requests.chat, chat)
        model = task.model or context.config.served_model_names[0]
        builder = ResponseBuilder(ChatFormat(context.formatter), task, model)
        with ExitStack() as admission:
            admission.enter_context(context.admission.admit(stored.owner, len(task.choices)))
            held = admission.pop_all()

        async def work() -> None:
            with held:
                try:
                    document = await builder.whole(context.generate(task, stored.owner))
                    shape = ResponsesShape(response)
                    shape.prompt_ids = task.choices[0].request.prompt
                    shape.whole(document)
                except Exception as error:  # a client reads it from the response
                    self._fail(stored, response, error)

        stored.work = asyncio.create_task(work())
        self.store.put(stored)
        return add_header(Document(stored.document), ignored)

    def _fail(self, stored: StoredResponse, response: ResponseDocument, error: Exception) -> None:
        api_error = as_api_error(error)
        log_failure(api_error, error)
        failure = {"code": api_error.code or "server_error", "message": api_error.message}
        stored.document = response.document(FAILED, failure)
        self.store.update(stored)


def add_responses_routes(routes: APIRouter, context: ServerContext, store: ResponseStore) -> None:
    api = ResponsesApi(context, store)

    @routes.post("/v1/responses", responses=ERROR_RESPONSES, response_model=None)
    @routes.post("/responses", include_in_schema=False, response_model=None)
    async def create_response(request: Request, body: ResponsesRequest) -> Response:
        """A response to text or items, stored in memory unless `store` is false."""
        return await api.create(request, body)

    @routes.post("/v1/responses/input_tokens", responses=ERROR_RESPONSES, response_model=None)
    async def count_input_tokens(request: Request, body: ResponsesRequest) -> Json:
        """How many tokens the input of a response has."""
        tokens = await api.num_input_tokens(request, body)
        return {"object": "response.input_tokens", "input_tokens": tokens}

    @routes.get(
        "/v1/responses/{response_id}",
        responses={400: ERROR_RESPONSES[400], 404: ERROR_RESPONSES[404]},
        response_model=None,
    )
    async def get_response(request: Request, response_id: str, stream: bool = False) -> Response:
        """A stored response, as a whole: the events of its stream are not kept."""
        if stream:
            raise ApiError(400, "a stored response is not streamed again; leave out stream", param="stream")
        return Document(api.store.get(response_id, request.scope[KEY_SCOPE]).document)

    @routes.delete("/v1/responses/{response_id}", responses={404: ERROR_RESPONSES[404]}, response_model=None)
    async def delete_response(request: Request, response_id: str) -> Response:
        """Forget a response. Those that continue from it stay."""
        api.store.delete(response_id, request.scope[KEY_SCOPE])
        return Document({"id": response_id, "object": "response", "deleted": True})

    @routes.post("/v1/responses/{response_id}/cancel", responses=ERROR_RESPONSES, response_model=None)
    async def cancel_response(request: Request, response_id: str) -> Response:
        """Stop a background response."""
        return Document(api.cancel(response_id, request.scope[KEY_SCOPE]))

    @routes.get("/v1/responses/{response_id}/input_items", responses={404: ERROR_RESPONSES[404]}, response_model=None)
    async def input_items(
        request: Request,
        response_id: str,
        limit: int = Query(20, ge=1, le=MAX_LISTED),
        order: Literal["asc", "desc"] = "desc",
        after: str | None = None,
    ) -> Response:
        """The items that a response was given, the latest first."""
        items = api.store.get(response_id, request.scope[KEY_SCOPE]).inputs
        return Document(item_page(items if order == "asc" else items[::-1], limit, after))


def item_page(items: list[Json], limit: int, after: str | None) -> Json:
    """Some of the items, from the one after `after` on."""
    ids = [item["id"] for item in items]
    start = ids.index(after) + 1 if after in ids else 0
    shown = items[start : start + limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": start + limit < len(items),
    }
