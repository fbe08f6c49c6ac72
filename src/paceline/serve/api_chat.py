"""What the translations of other APIs share: checked request bodies, and the pieces of a chat completion's output."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from paceline.serve.api_shape import Json
from paceline.serve.errors import ApiError
from paceline.serve.schema import ChatRequest

Body = TypeVar("Body", bound=BaseModel)
TEXT, REASONING, TOOL_CALL = "text", "reasoning", "tool_call"
TEXT_PARTS = ("text", "input_text", "output_text", "summary_text", "reasoning_text")


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """A part of an output: characters of its text, of its reasoning, or of the arguments of a tool call.

    call_index  which of the tool calls
    call_id     on the first piece of a tool call, with its name
    logprobs    entries of the tokens, as a chat completion has them
    """

    kind: str
    text: str
    call_index: int = 0
    call_id: str | None = None
    name: str | None = None
    logprobs: list[Json] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, int]:
        """Pieces with the same key belong to the same item of the output."""
        return self.kind, self.call_index

    @property
    def is_blank(self) -> bool:
        """Log-probabilities alone: their tokens are no characters of the text, or not yet."""
        return self.kind == TEXT and not self.text


def output_pieces(message: Json, logprobs: Json | None = None) -> Iterator[OutputPiece]:
    """The pieces of a chat completion's message, or of the delta of a chunk."""
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning:
        yield OutputPiece(REASONING, reasoning)
    entries = (logprobs or {}).get("content") or []
    if message.get("content") or entries:
        yield OutputPiece(TEXT, message.get("content") or "", logprobs=entries)
    for place, call in enumerate(message.get("tool_calls") or ()):
        function = call.get("function") or {}
        index = call.get("index", place)
        arguments = function.get("arguments") or ""
        yield OutputPiece(TOOL_CALL, arguments, index, call.get("id"), function.get("name"))


def chunk_pieces(chunk: Json) -> Iterator[OutputPiece]:
    for choice in chunk["choices"]:
        yield from output_pieces(choice["delta"], choice.get("logprobs"))


def without_blanks(pieces: Iterable[OutputPiece]) -> list[OutputPiece]:
    """Log-probabilities beside reasoning or a call are those of its tokens, which no text shows."""
    all_pieces = list(pieces)
    return all_pieces if len(all_pieces) == 1 else [piece for piece in all_pieces if not piece.is_blank]


def finish_of(document: Json) -> Json:
    """The first choice of a document or chunk if it has a finish_reason, else an empty dictionary."""
    choices = document["choices"]
    return choices[0] if choices and choices[0].get("finish_reason") else {}


def checked(schema: type[Body], document: Json) -> Body:
    """A body of ours. What is wrong with it is a 400, as if the client had sent it."""
    try:
        return schema.model_validate(document)
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False), body=document) from None


def chat_request(document: Json) -> ChatRequest:
    """The chat request of another API's body. Their answers have one choice."""
    if document.get("n") not in (None, 1):
        raise ApiError(400, "this route gives one answer; n is for chat completions and completions", param="n")
    return checked(ChatRequest, document)


def text_of(content: Any, param: str) -> str:
    """The text of a string or of a list of text parts. Raises ApiError 400 for images, audio and files."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ApiError(400, f"{param} must be a string or a list of parts", param=param)
    return "".join(part_text(part, param) for part in content)


def part_text(part: Any, param: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise ApiError(400, f"{param} holds a part that is not an object", param=param)
    kind, text = part.get("type"), part.get("text", part.get("refusal"))
    if kind in (*TEXT_PARTS, "refusal") and isinstance(text, str):
        return text
    raise ApiError(400, f"{param} holds a part of type {str(kind)[:40]!r}; this server reads text", param=param)


def string_of(item: Json, name: str, param: str) -> str:
    """A field of an item that must be a string."""
    value = item.get(name)
    if not isinstance(value, str):
        raise ApiError(400, f"{param}.{name} must be a string", param=f"{param}.{name}")
    return value


def with_one_system_message(messages: list[Json]) -> list[Json]:
    """The messages with those at the start that give instructions joined: many chat templates take only one."""
    count = next((i for i, message in enumerate(messages) if message["role"] not in ("system", "developer")), None)
    leading = messages[:count]
    if len(leading) < 2:
        return messages
    joined = "\n\n".join(message["content"] for message in leading)
    return [{"role": "system", "content": joined}, *messages[len(leading) :]]


def json_object(arguments: str) -> Json:
    """The arguments of a tool call as an object. A model may write anything: what is no object stays a string."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": arguments}


def tool_call(call_id: str, name: str, arguments: str) -> Json:
    """A tool call of a chat message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def given(**fields: Any) -> Json:
    """The fields that a request sets."""
    return {name: value for name, value in fields.items() if value is not None}
