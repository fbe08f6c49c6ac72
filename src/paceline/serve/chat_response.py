"""Chat completions: messages with content, reasoning and tool calls, whole or as deltas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.core.types import RequestOutput
from paceline.serve.output_pieces import ContentText, OutputPiece, ReasoningText, ToolArguments, ToolCallName
from paceline.serve.output_syntax import OutputSyntax

Json = dict[str, Any]


class ChoiceWriter(Protocol):
    """The text of one choice as fields of its response, while it arrives."""

    def opening(self) -> Json:
        """Fields of the first chunk."""

    def add(self, output: RequestOutput) -> Json:
        """Fields of the chunk for this output."""

    def closing(self) -> Json:
        """Fields of the last chunk."""

    def whole(self) -> Json:
        """Fields of the whole choice."""

    def finish_reason(self, reason: str | None) -> str | None:
        """The reason as the response gives it."""

    @property
    def num_reasoning_tokens(self) -> int: ...


@dataclass(slots=True)
class WrittenCall:
    """A tool call of an answer."""

    id: str
    name: str
    arguments: str = ""

    def document(self) -> Json:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(slots=True)
class MessageDelta:
    """What one output adds to a message."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, Json] = field(default_factory=dict)  # by index

    def document(self) -> Json:
        fields: Json = {"reasoning_content": self.reasoning, "reasoning": self.reasoning} if self.reasoning else {}
        if self.content:
            fields["content"] = self.content
        if self.calls:
            fields["tool_calls"] = list(self.calls.values())
        return fields


class ChatWriter:
    """One message. Deltas name a call and give its id once; what follows carries its index alone."""

    def __init__(self, syntax: OutputSyntax, echo: str = "") -> None:
        self._syntax, self._parser = syntax, syntax.parser()
        self._counter = syntax.reasoning.counter() if syntax.reasoning else None
        self._echo, self._content, self._reasoning = echo, echo, ""
        self._calls: list[WrittenCall] = []
        self._is_beyond = False  # inside a call that the request does not take

    @property
    def num_reasoning_tokens(self) -> int:
        return self._counter.count if self._counter else 0

    def opening(self) -> Json:
        """The role. Content is empty as OpenAI sends it, and null where a tool call may come instead."""
        content = self._echo or (None if self._syntax.offers_tools else "")
        return {"delta": {"role": "assistant", "content": content}}

    def add(self, output: RequestOutput) -> Json:
        if self._counter:
            self._counter.add(output.token_ids)
        pieces = self._parser.feed(output.text)
        if output.finish_reason is not None:
            pieces += self._parser.finish()
        delta = MessageDelta()
        for piece in pieces:
            self._add_piece(piece, delta)
        return {"delta": delta.document()}

    def closing(self) -> Json:
        return {"delta": {}}

    def whole(self) -> Json:
        message: Json = {"role": "assistant", "content": self._content, "refusal": None}
        if self._syntax.reasoning:  # vLLM's clients read the field unasked
            message["reasoning"] = self._reasoning or None
        if self._reasoning:
            message["reasoning_content"] = self._reasoning
        if self._calls:
            message["tool_calls"] = [call.document() for call in self._calls]
        if self._calls and not self._content and not self._syntax.is_forced:
            message["content"] = None
        return {"message": message}

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._calls else reason

    def _add_piece(self, piece: OutputPiece, delta: MessageDelta) -> None:
        if isinstance(piece, ContentText):
            self._content += piece.text
            delta.content += piece.text
        elif isinstance(piece, ReasoningText):
            self._reasoning += piece.text
            delta.reasoning += piece.text
        elif isinstance(piece, ToolCallName):
            self._is_beyond = bool(self._calls) and not self._syntax.is_parallel
            if not self._is_beyond:
                self._add_call(piece, delta)
        elif not self._is_beyond:
            self._add_arguments(piece, delta)

    def _add_call(self, piece: ToolCallName, delta: MessageDelta) -> None:
        call = WrittenCall(self._syntax.call_id(), piece.name)
        delta.calls[len(self._calls)] = {"index": len(self._calls), **call.document()}
        self._calls.append(call)

    def _add_arguments(self, piece: ToolArguments, delta: MessageDelta) -> None:
        index = len(self._calls) - 1
        self._calls[index].arguments += piece.text
        entry = delta.calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
        entry["function"]["arguments"] += piece.text
