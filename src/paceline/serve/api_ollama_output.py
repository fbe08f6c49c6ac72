"""A completion as Ollama's clients read it: one JSON document a line, with durations in nanoseconds."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from datetime import UTC, datetime

from paceline.serve.api_chat import REASONING, TEXT, OutputPiece, finish_of, json_object, output_pieces
from paceline.serve.api_shape import Json, JsonLinesShape
from paceline.serve.errors import ERROR_SHAPES, ApiError

DONE_REASONS = {"length": "length"}  # every other end is a stop


def error_body(error: ApiError) -> Json:
    """Ollama's error."""
    return {"error": error.message}


ERROR_SHAPES["/api/"] = error_body


def timestamp(seconds: float | None = None) -> str:
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class OllamaShape(JsonLinesShape):
    """Lines of /api/chat; of /api/generate where `is_chat` is false. model: the name that the client used."""

    def __init__(self, model: str, *, is_chat: bool) -> None:
        self._model, self._is_chat = model, is_chat
        self._started = time.perf_counter_ns()
        self._first_token: int | None = None
        self._calls: dict[int, OutputPiece] = {}  # a tool call is one line, once its arguments are complete
        self._usage: Json = {}
        self._finish_reason = "stop"

    def whole(self, document: Json) -> Json:
        choice = document["choices"][0]
        self._read(document)
        pieces = list(_pieces(choice.get("message"), choice))
        for piece in pieces:
            self._keep_call(piece)
        text = "".join(piece.text for piece in pieces if piece.kind == TEXT)
        reasoning = "".join(piece.text for piece in pieces if piece.kind == REASONING)
        entries = [entry for piece in pieces for entry in piece.logprobs]
        return self._line(text, reasoning, self._finished_calls(), entries) | self._closing()

    async def chunks(self, chunks: AsyncGenerator[Json, None]) -> AsyncGenerator[Json, None]:
        async with aclosing(chunks):
            async for chunk in chunks:
                for line in self._lines(chunk):
                    yield line
        calls = self._finished_calls()
        if calls:
            yield {**self._line("", "", calls), "done": False}
        yield self._line("") | self._closing()

    def _lines(self, chunk: Json) -> Iterator[Json]:
        self._read(chunk)
        for choice in chunk["choices"]:
            for piece in _pieces(choice.get("delta"), choice):
                if piece.text and self._first_token is None:
                    self._first_token = time.perf_counter_ns()
                if not self._keep_call(piece) and (piece.text or piece.logprobs):
                    parts = (piece.text, "") if piece.kind == TEXT else ("", piece.text)
                    yield {**self._line(*parts, entries=piece.logprobs), "done": False}

    def _read(self, document: Json) -> None:
        self._usage = document.get("usage") or self._usage
        self._finish_reason = finish_of(document).get("finish_reason") or self._finish_reason

    def _keep_call(self, piece: OutputPiece) -> bool:
        """Whether the piece belongs to a tool call, whose characters are then kept until the end."""
        if piece.kind in (TEXT, REASONING):
            return False
        before = self._calls.get(piece.call_index)
        text = before.text + piece.text if before else piece.text
        name, call_id = (before.name, before.call_id) if before else (piece.name, piece.call_id)
        self._calls[piece.call_index] = OutputPiece(piece.kind, text, piece.call_index, call_id, name)
        return True

    def _finished_calls(self) -> list[Json]:
        return [
            {"id": call.call_id, "function": {"index": index, "name": call.name, "arguments": json_object(call.text)}}
            for index, call in sorted(self._calls.items())
        ]

    def _line(
        self, text: str, reasoning: str = "", calls: list[Json] | None = None, entries: list[Json] | None = None
    ) -> Json:
        extra: Json = {"thinking": reasoning} if reasoning else {}
        header: Json = {"model": self._model, "created_at": timestamp()}
        if entries:
            header["logprobs"] = entries
        if not self._is_chat:
            return {**header, "response": text, **extra}
        if calls:
            extra["tool_calls"] = calls
        return {**header, "message": {"role": "assistant", "content": text, **extra}}

    def _closing(self) -> Json:
        """The fields of the last line."""
        end = time.perf_counter_ns()
        first = self._first_token or self._started  # a whole answer does not tell them apart
        return {
            "done": True,
            "done_reason": DONE_REASONS.get(self._finish_reason, "stop"),
            "total_duration": end - self._started,
            "load_duration": 0,
            "prompt_eval_count": self._usage.get("prompt_tokens", self.prompt_tokens),
            "prompt_eval_duration": first - self._started,
            "eval_count": self._usage.get("completion_tokens", 0),
            "eval_duration": end - first,
        }


def _pieces(message: Json | None, choice: Json) -> Iterator[OutputPiece]:
    """Of a chat completion's choice, or of a completion's, which has its text beside it."""
    if message is None:
        yield OutputPiece(TEXT, choice.get("text") or "")
    else:
        yield from output_pieces(message, choice.get("logprobs"))
