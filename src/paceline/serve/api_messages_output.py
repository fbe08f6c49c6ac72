"""A chat completion as a message of /v1/messages: its content blocks, the events of its stream, its errors."""

from __future__ import annotations

import base64
import hashlib
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

from paceline.serve.api_chat import (
    REASONING,
    TEXT,
    TOOL_CALL,
    OutputPiece,
    chunk_pieces,
    finish_of,
    json_object,
    output_pieces,
)
from paceline.serve.api_shape import Json, NamedEvents
from paceline.serve.errors import ERROR_SHAPES, ApiError

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
DELTAS = {
    TEXT: ("text_delta", "text"),
    REASONING: ("thinking_delta", "thinking"),
    TOOL_CALL: ("input_json_delta", "partial_json"),
}
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(error: ApiError) -> Json:
    """Anthropic's error."""
    message = _context_message(error) if error.code == "context_length_exceeded" else error.message
    return {"type": "error", "error": {"type": ERROR_TYPES.get(error.status, "api_error"), "message": message}}


def _context_message(error: ApiError) -> str:
    """In words that clients look for: after the first they ask for fewer tokens, after the others they shorten the
    conversation."""
    num_tokens, limit = error.counts.get("n_prompt_tokens"), error.counts.get("n_ctx")
    if error.asked_tokens is not None:
        sizes = f"{num_tokens} + {error.asked_tokens} > {limit}"
        return f"input length and `max_tokens` exceed context limit: {sizes}; {error.message}"
    sizes = "" if num_tokens is None else f"{num_tokens} tokens > {limit} maximum; "
    return f"prompt is too long: {sizes}{error.message}"


ERROR_SHAPES["/v1/messages"] = error_body


class ContentBlock:
    """One block of a message while its characters arrive."""

    def __init__(self, piece: OutputPiece) -> None:
        self.key, self.kind, self.name = piece.key, piece.kind, piece.name or ""
        self.call_id = piece.call_id or f"toolu_{uuid.uuid4().hex}"
        self.text = ""

    def document(self, text: str) -> Json:
        """The block with these characters; at the start of a stream none."""
        if self.kind == TOOL_CALL:
            return {"type": "tool_use", "id": self.call_id, "name": self.name, "input": json_object(text)}
        if self.kind == REASONING:
            return {"type": "thinking", "thinking": text, "signature": ""}
        return {"type": "text", "text": text}

    @property
    def signature(self) -> str:
        """That of a thinking block: clients send only signed ones back. It is not checked."""
        return base64.b64encode(hashlib.sha256(self.text.encode("utf-8", "replace")).digest()).decode()

    @property
    def whole(self) -> Json:
        signature = {"signature": self.signature} if self.kind == REASONING else {}
        return self.document(self.text) | signature


class MessageDocument:
    """A message while its output arrives."""

    def __init__(self) -> None:
        self._id = f"msg_{uuid.uuid4().hex}"
        self._usage: Json = {"prompt_tokens": 0, "completion_tokens": 0}
        self._model = ""
        self._choice: Json = {}
        self.blocks: list[ContentBlock] = []

    def add(self, piece: OutputPiece) -> ContentBlock:
        if not self.blocks or self.blocks[-1].key != piece.key:
            self.blocks.append(ContentBlock(piece))
        self.blocks[-1].text += piece.text
        return self.blocks[-1]

    def read(self, document: Json) -> None:
        """Take what a chat completion or a chunk says about the whole: model, finish_reason, usage."""
        self._model = document["model"]
        self._choice = finish_of(document) or self._choice
        self._usage = document.get("usage") or self._usage

    def expect(self, prompt_tokens: int) -> None:
        """Count the prompt before the output starts."""
        self._usage = {**self._usage, "prompt_tokens": prompt_tokens}

    def stop(self) -> Json:
        """Why the message ended."""
        reason, stop_string = self._choice.get("finish_reason"), self._choice.get("stop_reason")
        if reason == "stop" and isinstance(stop_string, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": stop_string}
        return {"stop_reason": STOP_REASONS.get(str(reason), "end_turn") if reason else None, "stop_sequence": None}

    def usage(self) -> Json:
        """Token counts. Those read from the prefix cache and written to it are counted apart, as Anthropic does."""
        details: dict[str, Any] = self._usage.get("prompt_tokens_details") or {}
        cached, written = details.get("cached_tokens") or 0, details.get("cache_write_tokens") or 0
        return {
            "input_tokens": self._usage["prompt_tokens"] - cached - written,
            "output_tokens": self._usage["completion_tokens"],
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": cached,
        }

    def document(self) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [block.whole for block in self.blocks],
            **self.stop(),
            "usage": self.usage(),
        }


class MessagesShape(NamedEvents):
    """Anthropic's Messages API."""

    def __init__(self) -> None:
        self._message = MessageDocument()
        self._open: ContentBlock | None = None

    def whole(self, document: Json) -> Json:
        self._message.read(document)
        for piece in output_pieces(document["choices"][0]["message"]):
            self._message.add(piece)
        if not self._message.blocks:  # an end token came first
            self._message.add(OutputPiece(TEXT, ""))
        return self._message.document()

    async def chunks(self, chunks: AsyncGenerator[Json, None]) -> AsyncGenerator[Json, None]:
        async with aclosing(chunks):
            self._message.expect(self.prompt_tokens)
            self._message.read(first := await anext(chunks))
            yield {"type": "message_start", "message": self._message.document()}
            yield {"type": "ping"}
            for event in self._chunk_events(first):
                yield event
            async for chunk in chunks:
                for event in self._chunk_events(chunk):
                    yield event
        for event in self._closing_events():
            yield event

    def error(self, error: ApiError) -> Json:
        return error_body(error)

    def _chunk_events(self, chunk: Json) -> Iterator[Json]:
        for piece in chunk_pieces(chunk):
            if not piece.is_blank:  # a message has no log-probabilities
                yield from self._piece_events(piece)
        self._message.read(chunk)

    def _piece_events(self, piece: OutputPiece) -> Iterator[Json]:
        if self._open is not None and self._open.key != piece.key:
            yield from self._block_end(self._open)
        if self._open is None:
            self._open = self._message.add(piece)
            yield {"type": "content_block_start", "index": self._index, "content_block": self._open.document("")}
        else:
            self._message.add(piece)
        if piece.text:
            kind, name = DELTAS[piece.kind]
            yield {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, name: piece.text}}

    @property
    def _index(self) -> int:
        return len(self._message.blocks) - 1

    def _block_end(self, block: ContentBlock) -> Iterator[Json]:
        if block.kind == REASONING:
            delta = {"type": "signature_delta", "signature": block.signature}
            yield {"type": "content_block_delta", "index": self._index, "delta": delta}
        self._open = None
        yield {"type": "content_block_stop", "index": self._index}

    def _closing_events(self) -> Iterator[Json]:
        if not self._message.blocks:
            yield from self._piece_events(OutputPiece(TEXT, ""))
        if self._open is not None:
            yield from self._block_end(self._open)
        yield {"type": "message_delta", "delta": self._message.stop(), "usage": self._message.usage()}
        yield {"type": "message_stop"}
