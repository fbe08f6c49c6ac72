"""What a server answered, read from OpenAI's documents, whole or streamed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """One token of an answer and the best alternatives, all with their log-probabilities. Keys are UTF-8 bytes."""

    data: bytes
    logprob: float
    top: Mapping[bytes, float] = field(default_factory=dict)

    @property
    def all(self) -> dict[bytes, float]:
        """The alternatives and the token itself."""
        return {**self.top, self.data: self.logprob}

    @property
    def gap(self) -> float:
        """How far the two best are apart; infinite where only one is known."""
        values = sorted(self.top.values(), reverse=True)
        return values[0] - values[1] if len(values) > 1 else float("inf")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function. The arguments are the text that the server gave, not yet read as JSON."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts, where the server gives them. drafted: draft tokens that were verified for this answer."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    drafted: int | None = None


@dataclass(slots=True)
class Answer:
    """One choice of a response."""

    text: str = ""
    finish_reason: str | None = None
    tokens: list[TokenChoice] = field(default_factory=list)  # empty unless log-probabilities were asked for
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)

    @property
    def content(self) -> str:
        """All that two answers are compared by."""
        calls = "".join(f"<call {call.name} {call.arguments}>" for call in self.tool_calls)
        return f"{self.reasoning}{self.text}{calls}"

    def add(self, choice: Json, document: Json) -> None:
        """Take a whole choice, or one chunk of a stream."""
        message = choice.get("message") or choice.get("delta") or {}
        self.text += message.get("content") or choice.get("text") or ""
        self.reasoning += message.get("reasoning_content") or message.get("reasoning") or ""
        for call in message.get("tool_calls") or []:
            self._add_call(call)
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.tokens += token_choices(choice.get("logprobs") or {})
        self.add_usage(document, choice)

    def add_usage(self, document: Json, choice: Json | None = None) -> None:
        usage, timings = document.get("usage") or {}, document.get("timings") or {}
        details = usage.get("prompt_tokens_details") or {}
        drafted = ((choice or {}).get("x_paceline") or {}).get("drafted", timings.get("draft_n"))
        old = self.usage
        self.usage = Usage(
            usage.get("prompt_tokens", old.prompt_tokens),
            usage.get("completion_tokens", old.completion_tokens),
            details.get("cached_tokens", timings.get("cache_n", old.cached_tokens)),
            old.drafted if drafted is None else drafted,
        )

    def _add_call(self, call: Json) -> None:
        """A streamed call arrives in pieces with the same index."""
        function, index = call.get("function") or {}, call.get("index")
        name, arguments = function.get("name") or "", function.get("arguments") or ""
        if index is None or index >= len(self.tool_calls):
            self.tool_calls.append(ToolCall(name, arguments))
            return
        before = self.tool_calls[index]
        self.tool_calls[index] = ToolCall(before.name or name, before.arguments + arguments)


def token_choices(logprobs: Json) -> list[TokenChoice]:
    """The tokens of a chat completion's or a completion's logprobs."""
    if "content" in logprobs:
        return [_chat_token(entry) for entry in logprobs.get("content") or []]
    tokens, values = logprobs.get("tokens") or [], logprobs.get("token_logprobs") or []
    tops = logprobs.get("top_logprobs") or [{}] * len(tokens)
    return [
        TokenChoice(token.encode(), _number(value), {key.encode(): _number(item) for key, item in (top or {}).items()})
        for token, value, top in zip(tokens, values, tops)
    ]


def _chat_token(entry: Json) -> TokenChoice:
    top: dict[bytes, float] = {}
    for item in entry.get("top_logprobs") or []:
        data = _bytes(item)
        top[data] = max(top.get(data, float("-inf")), _number(item.get("logprob")))
    return TokenChoice(_bytes(entry), _number(entry.get("logprob")), top)


def _bytes(entry: Json) -> bytes:
    """OpenAI gives a token's bytes beside its text, because a token may hold a part of a character."""
    numbers = entry.get("bytes")
    return bytes(numbers) if numbers is not None else str(entry.get("token", "")).encode()


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else float("-inf")
