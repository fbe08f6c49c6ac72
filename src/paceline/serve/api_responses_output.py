"""A chat completion as a response of /v1/responses: its output items, and the events of its stream in their order."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from paceline.serve.api_chat import (
    REASONING,
    TEXT,
    TOOL_CALL,
    OutputPiece,
    chunk_pieces,
    finish_of,
    output_pieces,
    without_blanks,
)
from paceline.serve.api_responses_tools import CalledTool, CustomInput, ResponseTools
from paceline.serve.api_shape import Json, NamedEvents
from paceline.serve.errors import ApiError

OnFinish = Callable[[Json], None]
CUSTOM_CALL = "custom_call"
ID_PREFIXES = {TEXT: "msg", REASONING: "rs", TOOL_CALL: "fc", CUSTOM_CALL: "ctc"}
# The events of an item by its kind: of a piece of its text, and of the whole.
DELTA_EVENTS = {
    TEXT: ("response.output_text.delta", "response.output_text.done", "text"),
    REASONING: ("response.reasoning_text.delta", "response.reasoning_text.done", "text"),
    TOOL_CALL: ("response.function_call_arguments.delta", "response.function_call_arguments.done", "arguments"),
    CUSTOM_CALL: ("response.custom_tool_call_input.delta", "response.custom_tool_call_input.done", "input"),
}
COMPLETED, INCOMPLETE, FAILED, IN_PROGRESS = "completed", "incomplete", "failed", "in_progress"
TRUNCATED = "length"  # the finish_reason of an output that was cut


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


@dataclass(slots=True)
class OutputItem:
    """One item of the output while its text arrives.

    tool   which one it calls
    delta  what the latest piece has added to the text
    """

    opening: OutputPiece
    index: int
    tool: CalledTool
    id: str
    text: str = ""
    delta: str = ""
    logprobs: list[Json] = field(default_factory=list)
    custom_input: CustomInput = field(default_factory=CustomInput)

    @classmethod
    def opened(cls, piece: OutputPiece, index: int, tool: CalledTool) -> OutputItem:
        if piece.kind == TOOL_CALL and piece.call_id is None:
            piece = replace(piece, call_id=new_id("call"))
        kind = CUSTOM_CALL if tool.is_custom else piece.kind
        return cls(piece, index, tool, new_id(ID_PREFIXES[kind]))

    @property
    def kind(self) -> str:
        return CUSTOM_CALL if self.tool.is_custom else self.opening.kind

    @property
    def has_parts(self) -> bool:
        """Whether its text is a content part; that of a call is a field."""
        return self.kind not in (TOOL_CALL, CUSTOM_CALL)

    @property
    def place(self) -> Json:
        """Where events of the item's text belong."""
        place: Json = {"item_id": self.id, "output_index": self.index}
        return {**place, "content_index": 0} if self.has_parts else place

    def add(self, piece: OutputPiece) -> None:
        self.delta = self.custom_input.feed(piece.text) if self.tool.is_custom else piece.text
        self.text += self.delta
        self.logprobs += piece.logprobs

    def close(self) -> None:
        """No more pieces come."""
        text = self.custom_input.whole() if self.tool.is_custom else self.text
        self.delta = text.removeprefix(self.text)
        self.text = text

    def part(self) -> Json:
        """Its content part."""
        if self.kind == REASONING:
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self.logprobs)}

    def document(self, status: str) -> Json:
        if not self.has_parts:
            call = {"call_id": self.opening.call_id, **self.tool.fields, DELTA_EVENTS[self.kind][2]: self.text}
            item_type = "custom_tool_call" if self.tool.is_custom else "function_call"
            return {"id": self.id, "type": item_type, "status": status, **call}
        content = [] if status == IN_PROGRESS else [self.part()]
        if self.kind == REASONING:
            return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}


@dataclass(slots=True)
class RawMessages:
    """What the model read and wrote, as vLLM's enable_response_messages shows it. decode: token ids to text."""

    decode: Callable[[list[int]], str]
    prompt_ids: Sequence[int] = ()
    token_ids: list[int] = field(default_factory=list)

    def add(self, document: Json) -> None:
        """Take the tokens of a chat completion or a chunk."""
        for choice in document["choices"]:
            self.token_ids += choice.get("token_ids") or ()

    def fields(self) -> Json:
        read, written = self._message(list(self.prompt_ids)), self._message(self.token_ids)
        return {"input_messages": [read], "output_messages": [written]}

    def _message(self, token_ids: list[int]) -> Json:
        return {"type": "raw_message_tokens", "message": self.decode(token_ids), "tokens": token_ids}


class ResponseDocument:
    """The response while its output arrives.

    fields     what the response repeats of the request
    on_finish  called once with the finished response
    raw        for a request that asks for it
    """

    def __init__(
        self, response_id: str, fields: Json, on_finish: OnFinish, raw: RawMessages | None = None
    ) -> None:
        self.id, self._fields, self._on_finish = response_id, fields, on_finish
        self.raw = raw
        self._tools = ResponseTools(fields.get("tools") or [])
        self._created = int(time.time())
        self._items: list[OutputItem] = []
        self._usage: Json | None = None
        self._finish_reason: str | None = None
        self._model = ""

    @property
    def status(self) -> str:
        if self._finish_reason is None:
            return IN_PROGRESS
        return INCOMPLETE if self._finish_reason == TRUNCATED else COMPLETED

    def add(self, piece: OutputPiece) -> OutputItem:
        """The item that a piece belongs to, opened if it is new."""
        item = self._items[-1] if self._items else None
        if item is None or item.opening.key != piece.key:
            item = OutputItem.opened(piece, len(self._items), self._tools.called(piece.name))
            self._items.append(item)
        item.add(piece)
        return item

    def read(self, document: Json) -> None:
        """Take what a chat completion or a chunk says about the whole: model, finish_reason, usage."""
        self._model = document["model"]
        self._finish_reason = finish_of(document).get("finish_reason") or self._finish_reason
        self._usage = document.get("usage") or self._usage

    def drop_cut_call(self) -> None:
        """Leave out a last tool call that was cut: its arguments are no JSON, and no event has named it yet."""
        if self.status == INCOMPLETE and self._items and not self._items[-1].has_parts:
            self._items.pop()

    def finish(self) -> Json:
        if not self._items:  # an end token came first
            self.add(OutputPiece(TEXT, ""))
        for item in self._items:
            item.close()
        document = self.document()
        self._on_finish(document)
        return document

    def item_document(self, item: OutputItem) -> Json:
        """A finished item. Only the last one is cut where the output is."""
        is_cut = self.status == INCOMPLETE and item is self._items[-1]
        return item.document(INCOMPLETE if is_cut else COMPLETED)

    def document(self, status: str | None = None, error: Json | None = None) -> Json:
        status = status or self.status
        done = status in (COMPLETED, INCOMPLETE)
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == COMPLETED else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == INCOMPLETE else None,
            "model": self._model,
            "output": [self.item_document(item) for item in self._items] if done else [],
            "usage": usage_of(self._usage) if self._usage else None,
            **self._fields,
            **(self.raw.fields() if self.raw and done else {}),
        }


def usage_of(usage: Json) -> Json:
    prompt, completion = usage.get("prompt_tokens_details") or {}, usage.get("completion_tokens_details") or {}
    names = ("cached_tokens", "cache_write_tokens")
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {name: prompt.get(name) or 0 for name in names},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": completion.get("reasoning_tokens") or 0},
        "total_tokens": usage["total_tokens"],
    }


class ResponsesShape(NamedEvents):
    """OpenAI's Responses API. Events are numbered from 0."""

    def __init__(self, response: ResponseDocument) -> None:
        self._response = response
        self._sequence_number = 0
        self._open: OutputItem | None = None
        self._held: list[Json] = []  # log-probabilities of characters that are still to come

    def whole(self, document: Json) -> Json:
        self._read_tokens(document)
        self._response.read(document)
        choice = document["choices"][0]
        for piece in without_blanks(output_pieces(choice["message"], choice.get("logprobs"))):
            self._response.add(piece)
        self._response.drop_cut_call()
        return self._response.finish()

    async def chunks(self, chunks: AsyncGenerator[Json, None]) -> AsyncGenerator[Json, None]:
        async with aclosing(chunks):
            self._response.read(first := await anext(chunks))
            for kind in ("response.created", "response.in_progress"):
                yield self._event(kind, response=self._response.document(IN_PROGRESS))
            for event in self._chunk_events(first):
                yield event
            async for chunk in chunks:
                for event in self._chunk_events(chunk):
                    yield event
        for event in self._closing_events():
            yield event

    def error(self, error: ApiError) -> Json:
        failure = {"code": error.code or "server_error", "message": error.message}
        return self._event("response.failed", response=self._response.document(FAILED, failure))

    def _event(self, kind: str, **fields: object) -> Json:
        event = {"type": kind, **fields, "sequence_number": self._sequence_number}
        self._sequence_number += 1
        return event

    def _read_tokens(self, document: Json) -> None:
        if self._response.raw is not None:
            self._response.raw.prompt_ids = self.prompt_ids
            self._response.raw.add(document)

    def _chunk_events(self, chunk: Json) -> Iterator[Json]:
        self._read_tokens(chunk)
        for piece in without_blanks(chunk_pieces(chunk)):
            if piece.is_blank and (self._open is None or self._open.kind != TEXT):
                self._held += piece.logprobs  # no reason to end an item, or to begin one
            else:
                yield from self._piece_events(self._with_held(piece))
        self._response.read(chunk)

    def _with_held(self, piece: OutputPiece) -> OutputPiece:
        """A text with the log-probabilities that came before its characters; those before other pieces are of marks."""
        held, self._held = self._held, []
        return replace(piece, logprobs=[*held, *piece.logprobs]) if held and piece.kind == TEXT else piece

    def _piece_events(self, piece: OutputPiece) -> Iterator[Json]:
        if self._open is not None and self._open.opening.key != piece.key:
            yield from self._item_done(self._open)
        is_new = self._open is None
        item = self._open = self._response.add(piece)
        if is_new:
            yield from self._item_added(item)
        if item.delta:
            logprobs = {"logprobs": piece.logprobs} if item.kind == TEXT else {}
            yield self._event(DELTA_EVENTS[item.kind][0], **item.place, delta=item.delta, **logprobs)

    def _item_added(self, item: OutputItem) -> Iterator[Json]:
        blank = OutputItem(item.opening, item.index, item.tool, item.id)
        document = blank.document(IN_PROGRESS)
        yield self._event("response.output_item.added", output_index=item.index, item=document)
        if item.has_parts:
            yield self._event("response.content_part.added", **item.place, part=blank.part())

    def _item_done(self, item: OutputItem) -> Iterator[Json]:
        delta, done, name = DELTA_EVENTS[item.kind]
        item.close()
        if item.delta:
            yield self._event(delta, **item.place, delta=item.delta)
        fields: Json = {name: item.text}
        if item.kind == TEXT:
            fields["logprobs"] = item.logprobs
        if item.kind == TOOL_CALL:
            fields |= item.tool.fields
        yield self._event(done, **item.place, **fields)
        if item.has_parts:
            yield self._event("response.content_part.done", **item.place, part=item.part())
        document = self._response.item_document(item)
        yield self._event("response.output_item.done", output_index=item.index, item=document)
        self._open = None

    def _closing_events(self) -> Iterator[Json]:
        if self._open is None and self._sequence_number == 2:
            yield from self._piece_events(OutputPiece(TEXT, ""))  # an end token came first
        if self._open is not None:
            yield from self._item_done(self._open)
        document = self._response.finish()
        yield self._event(f"response.{document['status']}", response=document)
