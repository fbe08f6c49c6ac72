"""The body of /v1/responses to a chat request: items to messages, tools and formats to their chat spelling."""

from __future__ import annotations

import uuid
from typing import Annotated, Any

from pydantic import Field

from paceline.serve.api_chat import given, string_of, text_of, tool_call, with_one_system_message
from paceline.serve.api_responses_tools import ResponseTools, custom_arguments, function_name
from paceline.serve.api_shape import Json
from paceline.serve.errors import ApiError
from paceline.serve.schema import Count, LenientModel

LOGPROBS = "message.output_text.logprobs"  # asked for by `include`
Items = Annotated[list[dict[str, Any]], Field(max_length=4096)]
# What a response shows of its request, with the value for a request that does not say.
SHOWN_FIELDS: Json = {
    "background": False,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
# Fields that are read here; all others go on to the chat request as they are.
OWN_FIELDS = frozenset(
    {
        *SHOWN_FIELDS, "input", "include", "model", "stream", "stream_options", "conversation", "prompt",
        "enable_response_messages",
    }
    - {"temperature", "top_p", "metadata", "user", "prompt_cache_key", "safety_identifier", "parallel_tool_calls"}
)  # fmt: skip


class ResponsesRequest(LenientModel):
    """Body of /v1/responses."""

    model: str | None = None
    input: str | Items | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    include: list[str] | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    tools: Items | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: str | None = None
    metadata: dict[str, Any] | None = None
    enable_response_messages: bool | None = Field(default=None, description="show what the model read and wrote")

    @property
    def fields(self) -> Json:
        """What the client has sent, but for nulls."""
        return self.model_dump(exclude_unset=True, exclude_none=True)

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def items(self) -> list[Json]:
        """The input as items with ids, as they are stored."""
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input or []
        return [_with_id(item) for item in items]


def _with_id(item: Json) -> Json:
    kind = item.get("type") or "message"
    if not isinstance(kind, str):
        raise ApiError(400, "the type of an item of input must be a string", param="input")
    item = {**item, "type": kind, "id": item.get("id") or f"{kind[:3]}_{uuid.uuid4().hex}"}
    if kind == "message" and isinstance(item.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        item["content"] = [{"type": part, "text": item["content"]}]
    return item


def shown_fields(body: ResponsesRequest) -> Json:
    """What a response repeats of its request."""
    return {name: body.fields.get(name, default) for name, default in SHOWN_FIELDS.items()}


def chat_document(body: ResponsesRequest, items: list[Json]) -> Json:
    """The chat request. items: those of the whole conversation."""
    fields = body.fields
    _check(body, fields)
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    document = {name: value for name, value in fields.items() if name not in OWN_FIELDS}
    document |= given(model=body.model, max_tokens=body.max_output_tokens)
    document |= _tools(body) | _output_format(body) | _reasoning(body) | _logprobs(body)
    if body.truncation == "auto":
        document["truncate_prompt_tokens"] = -1
    if body.stream:
        document |= {"stream": True, "stream_options": {"include_usage": True}}
    if body.enable_response_messages:
        document["return_token_ids"] = True
    messages = with_one_system_message(system + messages_of(items))
    return {**document, **_continued(items[-1]), "messages": messages}


def _check(body: ResponsesRequest, fields: Json) -> None:
    for name in ("conversation", "prompt"):
        if fields.get(name):
            message = f"{name} is kept by another service; send the input itself, or previous_response_id"
            raise ApiError(400, message, param=name, code="unsupported_parameter")
    if body.background and not body.is_stored:
        raise ApiError(400, "background can only be used when `store` is true", param="background")
    if body.background and body.stream:
        raise ApiError(400, "a background response is not streamed; retrieve it by its id", param="stream")


# --- items ------------------------------------------------------------------------------------------------------------


def messages_of(items: list[Json]) -> list[Json]:
    """The chat messages of items. What one turn of the assistant wrote becomes one message."""
    messages: list[Json] = []
    for index, item in enumerate(items):
        message = _message(item, f"input.{index}")
        if messages and message["role"] == messages[-1]["role"] == "assistant" and _continues(messages[-1], message):
            _join(messages[-1], message)
        else:
            messages.append(message)
    if not messages:
        raise ApiError(400, "input is empty; there is nothing to answer", param="input")
    return messages


def _continues(turn: Json, message: Json) -> bool:
    """Reasoning opens a turn, a text follows it, tool calls end it."""
    if "reasoning_content" in message:
        return False
    return "tool_calls" in message or not (turn.get("content") or turn.get("tool_calls"))


def _join(turn: Json, message: Json) -> None:
    turn["content"] = (turn.get("content") or "") + (message.get("content") or "")
    if "tool_calls" in message:
        turn["tool_calls"] = [*turn.get("tool_calls", ()), *message["tool_calls"]]


def _message(item: Json, param: str) -> Json:
    kind = item.get("type") or "message"
    if kind == "message":
        role = string_of(item, "role", param)
        return {"role": role, "content": text_of(item.get("content"), f"{param}.content")}
    if kind in ("function_call", "custom_tool_call"):
        return {"role": "assistant", "content": "", "tool_calls": [_call(item, param)]}
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = text_of(item.get("output"), f"{param}.output")
        return {"role": "tool", "tool_call_id": string_of(item, "call_id", param), "content": output}
    if kind == "reasoning":
        thoughts = text_of(item.get("content") or item.get("summary"), f"{param}.content")
        return {"role": "assistant", "content": "", "reasoning_content": thoughts}
    message = f"{param} is an item of type {str(kind)[:40]!r}, which this server does not read"
    raise ApiError(400, message, param=param)


def _call(item: Json, param: str) -> Json:
    name = function_name(string_of(item, "name", param), item.get("namespace"))
    if item["type"] == "custom_tool_call":
        arguments = custom_arguments(string_of(item, "input", param))
    else:
        arguments = string_of(item, "arguments", param)
    return tool_call(string_of(item, "call_id", param), name, arguments)


def _continued(item: Json) -> Json:
    """Fields that make the answer go on from a last message that is not complete."""
    is_open = item.get("role") == "assistant" and item.get("status") in ("in_progress", "incomplete")
    return {"continue_final_message": True, "add_generation_prompt": False} if is_open else {}


# --- tools, formats, reasoning, log-probabilities ---------------------------------------------------------------------


def _tools(body: ResponsesRequest) -> Json:
    tools = ResponseTools(body.tools or []).functions
    choice = body.tool_choice
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = choice.get("tools") or []
        if not isinstance(allowed, list):
            raise ApiError(400, "tool_choice.tools must be a list of tools", param="tool_choice.tools")
        names = {_chosen_name(tool) for tool in allowed if isinstance(tool, dict)}
        tools = [tool for tool in tools if tool["function"]["name"] in names]
        choice = choice.get("mode") or "auto"
    elif isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        choice = {"type": "function", "function": {"name": _chosen_name(choice)}}
    return given(tools=tools or None, tool_choice=choice)


def _chosen_name(choice: Json) -> Any:
    """The function that stands for a tool which a choice names."""
    return function_name(str(choice.get("name")), choice.get("namespace")) if choice.get("name") else None


def _output_format(body: ResponsesRequest) -> Json:
    """response_format, and a verbosity other than the usual one."""
    text = body.text or {}
    chosen = text.get("format") or {"type": "text"}
    if not isinstance(chosen, dict):
        raise ApiError(400, "text.format must be an object", param="text.format")
    if chosen.get("type") == "json_schema":
        if not isinstance(chosen.get("schema"), dict):
            raise ApiError(400, "text.format json_schema needs its schema", param="text.format.schema")
        names = ("name", "description", "schema", "strict")
        chosen = {"type": "json_schema", "json_schema": {name: chosen[name] for name in names if name in chosen}}
    verbosity = text.get("verbosity")
    return given(
        response_format=chosen if chosen.get("type") != "text" else None,
        verbosity=verbosity if verbosity != "medium" else None,
    )


def _reasoning(body: ResponsesRequest) -> Json:
    return given(reasoning_effort=(body.reasoning or {}).get("effort"))


def _logprobs(body: ResponsesRequest) -> Json:
    if not body.top_logprobs and LOGPROBS not in (body.include or ()):
        return {}
    return {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
