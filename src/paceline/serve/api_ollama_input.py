"""Bodies of Ollama's routes to chat requests and completions: options, formats, messages."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from paceline.serve.api_chat import given
from paceline.serve.api_shape import Json, as_text
from paceline.serve.errors import ApiError
from paceline.serve.schema import LenientModel

Documents = Annotated[list[dict[str, Any]], Field(max_length=4096)]
# Options that our fields have under another name.
RENAMED_OPTIONS = {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}
# Options of loading a model, which is loaded already.
LOAD_OPTIONS = frozenset(
    {
        "num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "numa", "low_vram", "f16_kv",
        "logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only", "repeat_last_n", "penalize_newline",
        "mirostat_tau", "mirostat_eta",
    }
)  # fmt: skip
LATEST = ":latest"  # Ollama's clients add it to a name without a tag


class OllamaRequest(LenientModel):
    """What the bodies of chats and generations have in common. A stream is the default."""

    model: str
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    keep_alive: str | float | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @property
    def is_streamed(self) -> bool:
        return self.stream is not False


class OllamaChatRequest(OllamaRequest):
    """Body of /api/chat."""

    messages: Documents | None = None
    tools: Documents | None = None


class OllamaGenerateRequest(OllamaRequest):
    """Body of /api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    raw: bool | None = None
    context: list[int] | None = None
    images: list[Any] | None = None


def served_name(name: str, names: tuple[str, ...]) -> str:
    """The name without Ollama's tag, where only that is served."""
    short = name.removesuffix(LATEST)
    return short if name not in names and short in names else name


def sampling_fields(body: OllamaRequest, names: tuple[str, ...]) -> Json:
    """The fields of a request but for its prompt. Options that we do not know stay under their names."""
    options = {name: value for name, value in (body.options or {}).items() if value is not None}
    fields = {RENAMED_OPTIONS.get(name, name): value for name, value in options.items() if name not in LOAD_OPTIONS}
    if isinstance(fields.get("max_tokens"), int) and fields["max_tokens"] < 0:
        del fields["max_tokens"]  # no limit
    if isinstance(fields.get("seed"), int) and fields["seed"] < 0:
        del fields["seed"]  # any
    if body.is_streamed:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return fields | {"model": served_name(body.model, names)} | given(response_format=_response_format(body))


def _response_format(body: OllamaRequest) -> Json | None:
    if not body.format:
        return None
    if isinstance(body.format, dict):
        return {"type": "json_schema", "json_schema": {"name": "format", "schema": body.format}}
    if body.format != "json":
        raise ApiError(400, "format is json or a JSON schema", param="format")
    return {"type": "json_object"}


def chat_fields(body: OllamaRequest) -> Json:
    """Fields that only a chat has: thinking and log-probabilities."""
    fields: Json = {}
    if isinstance(body.think, bool):
        fields["thinking"] = {"type": "enabled" if body.think else "disabled"}
    elif body.think:
        fields["reasoning_effort"] = body.think
    if body.logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return fields


def chat_messages(messages: list[Json]) -> list[Json]:
    """Ollama's messages as chat messages: tool calls get ids, and results the ids of the calls that they answer."""
    converted: list[Json] = []
    open_calls: list[Json] = []  # calls without a result yet
    for index, message in enumerate(messages):
        if message.get("images"):
            raise ApiError(400, f"messages.{index} has images; this server reads text", param="messages")
        chat_message = given(role=message.get("role"), content=message.get("content") or "")
        if message.get("thinking"):
            chat_message["reasoning_content"] = message["thinking"]
        if message.get("tool_calls"):
            chat_message["tool_calls"] = _tool_calls(message["tool_calls"], index)
            open_calls = list(chat_message["tool_calls"])
        if message.get("role") == "tool":
            chat_message["tool_call_id"] = _answered(open_calls, message)
        converted.append(chat_message)
    return converted


def _tool_calls(calls: Any, index: int) -> list[Json]:
    converted: list[Json] = []
    for place, call in enumerate(calls if isinstance(calls, list) else ()):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(400, f"messages.{index}.tool_calls.{place} has no function with a name", param="messages")
        arguments = as_text(function.get("arguments") or {})
        call_id = str(call.get("id") or f"call_{index}_{place}")
        converted.append(
            {"id": call_id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
        )
    return converted


def _answered(open_calls: list[Json], result: Json) -> str:
    """The id of the call that a result answers: the one it names, else the first of its name, else the first."""
    if isinstance(result.get("tool_call_id"), str):
        return str(result["tool_call_id"])
    name = result.get("tool_name") or result.get("name")
    named = [call for call in open_calls if call["function"]["name"] == name] or open_calls
    if not named:
        return "call"
    open_calls.remove(named[0])
    return str(named[0]["id"])
