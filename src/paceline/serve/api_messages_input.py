"""The body of /v1/messages to a chat request: content blocks to messages, tools to their chat spelling."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from paceline.serve.api_chat import given, part_text, string_of, text_of, tool_call
from paceline.serve.api_shape import Json, as_text
from paceline.serve.errors import ApiError
from paceline.serve.schema import Count, LenientModel

Blocks = Annotated[list[dict[str, Any]], Field(max_length=4096)]
# Fields that are read here, and those that change nothing; all others go on to the chat request as they are.
OWN_FIELDS = frozenset(
    {
        "model", "messages", "system", "max_tokens", "stop_sequences", "stream", "tools", "tool_choice", "thinking",
        "output_config", "output_format", "metadata", "service_tier", "container", "context_management", "betas",
        "cache_control", "inference_geo", "mcp_servers",
    }
)  # fmt: skip
TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
EFFORTS = {"max": "xhigh"}  # the highest that a chat knows
UNREAD_BLOCKS = ("redacted_thinking",)  # only its author can read them
TOOL_REFERENCE, TOOL_CHANGES = "tool_reference", ("tool_addition", "tool_removal")
BILLING_HEADER = "x-anthropic-billing-header:"  # begins a block for Anthropic's accounts, new with every request


class MessageParam(LenientModel):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class CountTokensRequest(LenientModel):
    """Body of /v1/messages/count_tokens."""

    model: str | None = None
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=4096)]
    system: str | Blocks | None = None
    tools: Blocks | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class MessagesRequest(CountTokensRequest):
    """Body of /v1/messages."""

    max_tokens: Count
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    output_config: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


def prompt_document(body: CountTokensRequest) -> Json:
    """What the chat template reads: messages, tools and the choice of one."""
    text = _system_text(body.system)
    system = [{"role": "system", "content": text}] if text else []
    messages = _combined([message for index, turn in enumerate(body.messages) for message in _messages(turn, index)])
    tools = [_tool(tool, f"tools.{index}") for index, tool in enumerate(_offered_tools(body))]
    document = given(model=body.model, tools=tools or None, thinking=body.thinking)
    document |= _tool_choice(body.tool_choice or {}) | {"messages": [*system, *messages]}
    if messages and messages[-1]["role"] == "assistant":  # the answer goes on from it
        document |= {"continue_final_message": True, "add_generation_prompt": False}
    return document


def chat_document(body: MessagesRequest) -> Json:
    """The chat request of a message."""
    fields = body.model_dump(exclude_unset=True, exclude_none=True)
    if fields.get("mcp_servers"):
        raise ApiError(400, "mcp_servers are not reached from this server; leave them out", param="mcp_servers")
    document = {name: value for name, value in fields.items() if name not in OWN_FIELDS}
    document |= prompt_document(body) | _output_config(fields)
    document |= given(max_tokens=body.max_tokens, stop=body.stop_sequences)
    if body.stream:
        document |= {"stream": True, "stream_options": {"include_usage": True}}
    return document


def _system_text(system: str | list[Json] | None) -> str:
    """The system prompt. A block that differs with every request would keep the rest off the prefix cache."""
    if not isinstance(system, list):
        return system or ""
    texts = [part_text(block, "system") for block in system]
    return "\n\n".join(text for text in texts if not text.startswith(BILLING_HEADER))


def _instructions(content: str | list[Json], param: str) -> list[Json]:
    """The message of a turn that gives instructions in the middle of a conversation; none where it has no text."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = [part_text(block, param) for block in blocks if block.get("type") not in TOOL_CHANGES]
    text = "".join(text for text in texts if not text.startswith(BILLING_HEADER))
    return [{"role": "system", "content": text}] if text else []


# --- content blocks ---------------------------------------------------------------------------------------------------


def _messages(turn: MessageParam, index: int) -> list[Json]:
    """The chat messages of one turn. Tool results are messages of their own, before the text of the turn."""
    param = f"messages.{index}.content"
    if turn.role == "system":
        return _instructions(turn.content, param)
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    return [_assistant(turn.content, param)] if turn.role == "assistant" else _user(turn.content, param)


def _combined(messages: list[Json]) -> list[Json]:
    """Turns of the assistant that follow one another are one, as Anthropic's API has it."""
    combined: list[Json] = []
    for message in messages:
        if combined and combined[-1]["role"] == message["role"] == "assistant":
            combined[-1] = _joined(combined[-1], message)
        else:
            combined.append(message)
    return combined


def _joined(first: Json, second: Json) -> Json:
    message = {**first, "content": "\n\n".join(text for text in (first["content"], second["content"]) if text)}
    for name, empty in (("tool_calls", []), ("reasoning_content", "")):
        if name in first or name in second:
            message[name] = first.get(name, empty) + second.get(name, empty)
    return message


def _user(blocks: list[Json], param: str) -> list[Json]:
    messages: list[Json] = []
    text = ""
    for block in blocks:
        if block.get("type") == "tool_result":
            messages.append(_tool_result(block, param))
        else:
            text += _block_text(block, param)
    return [*messages, {"role": "user", "content": text}] if text or not messages else messages


def _tool_result(block: Json, param: str) -> Json:
    parts = block.get("content")
    if isinstance(parts, list):  # a search for tools gives their names
        parts = [string_of(part, "tool_name", param) if _is_reference(part) else part for part in parts]
    content = text_of(parts, f"{param}.content")
    if block.get("is_error"):
        content = f"Error: {content}"
    return {"role": "tool", "tool_call_id": string_of(block, "tool_use_id", param), "content": content}


def _is_reference(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == TOOL_REFERENCE


def _assistant(blocks: list[Json], param: str) -> Json:
    message: Json = {"role": "assistant", "content": ""}
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use":
            arguments = as_text(block.get("input") or {})
            call = tool_call(string_of(block, "id", param), string_of(block, "name", param), arguments)
            message["tool_calls"] = [*message.get("tool_calls", ()), call]
        elif kind == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + string_of(block, "thinking", param)
        elif kind not in UNREAD_BLOCKS:
            message["content"] += part_text(block, param)
    return message


def _block_text(block: Json, param: str) -> str:
    """The text of a block; a document is text where it brings its text along."""
    source = block.get("source")
    if block.get("type") == "document" and isinstance(source, dict):
        if source.get("type") == "text" and isinstance(source.get("data"), str):
            return str(source["data"])
        if source.get("type") == "content":
            return text_of(source.get("content"), f"{param}.source.content")
    return part_text(block, param)


# --- tools, formats ---------------------------------------------------------------------------------------------------


def _offered_tools(body: CountTokensRequest) -> list[Json]:
    """The tools after what messages of the system have added and removed."""
    known = {string_of(tool, "name", f"tools.{index}"): tool for index, tool in enumerate(body.tools or ())}
    removed: set[str] = set()
    for index, turn in enumerate(body.messages):
        for block in turn.content if turn.role == "system" and isinstance(turn.content, list) else ():
            if block.get("type") in TOOL_CHANGES:
                _change_tools(block, known, removed, f"messages.{index}.content")
    return [tool for name, tool in known.items() if name not in removed]


def _change_tools(block: Json, known: dict[str, Json], removed: set[str], param: str) -> None:
    change, tool = block["type"], block.get("tool")
    if not isinstance(tool, dict):
        raise ApiError(400, f"{param}: {change} needs its tool", param=param)
    definition = tool.get("definition")
    if change == "tool_addition" and isinstance(definition, dict):
        known[string_of(definition, "name", param)] = definition
        removed.discard(definition["name"])
        return
    if not _is_reference(tool) or str(tool.get("name")) not in known:
        raise ApiError(400, f"{param}: {change} names no tool that is declared in tools", param=param)
    (removed.add if change == "tool_removal" else removed.discard)(str(tool["name"]))


def _tool(tool: Json, param: str) -> Json:
    if tool.get("type", "custom") != "custom":
        message = f"{param} is a tool of type {str(tool['type'])[:40]!r}; this server has the client's own tools only"
        raise ApiError(400, message, param=param)
    function = {"name": string_of(tool, "name", param), "parameters": tool.get("input_schema") or {"type": "object"}}
    function |= {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: Json) -> Json:
    kind = choice.get("type")
    if kind is None:
        return {}
    if kind == "tool":
        name = string_of(choice, "name", "tool_choice")
        chosen: Any = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in TOOL_CHOICES:
        chosen = TOOL_CHOICES[kind]
    else:
        raise ApiError(400, "tool_choice.type is auto, any, tool or none", param="tool_choice.type")
    parallel = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    return {"tool_choice": chosen, **parallel}


def _output_config(fields: Json) -> Json:
    config = fields.get("output_config") or {}
    chosen = config.get("format") or fields.get("output_format") or {}
    if not isinstance(chosen, dict):
        raise ApiError(400, "output_config.format must be an object", param="output_config.format")
    schema = {"type": "json_schema", "json_schema": {"name": "output", "schema": chosen.get("schema")}}
    return given(
        response_format=schema if chosen.get("type") == "json_schema" else None,
        reasoning_effort=EFFORTS.get(str(config.get("effort")), config.get("effort")),
    )
