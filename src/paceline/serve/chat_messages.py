"""Messages of a request as chat templates take them.

A template that has no place for tools gets them as text: a system message says how to call, and calls and results are
written into the messages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from paceline.hub.tokenizer import Message
from paceline.serve.schema import ChatMessage, Content, ToolCallParam
from paceline.serve.tools.json_calls import call_text
from paceline.serve.tools.offer import ToolOffer
from paceline.serve.tools.registry import ToolFormat

TOOLS_TEXT = """You can call these functions, each given as JSON with the schema of its arguments:
{tools}
To call one, write
<tool_call>
{{"name": "the name", "arguments": {{…}}}}
</tool_call>
and nothing after it. The results then arrive as <tool_response>. Call a function only if it helps."""


def content_text(content: Content) -> str:
    """The text of a message's content."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def template_messages(messages: Sequence[ChatMessage], tools: ToolFormat | None) -> list[Message]:
    """Messages for a template that takes tools."""
    names = call_names(messages)
    return [template_message(message, tools, names) for message in messages]


def template_message(
    message: ChatMessage, tools: ToolFormat | None = None, names: dict[str, str] | None = None
) -> Message:
    """A message as chat templates expect it: no role "developer", content as one string, arguments as objects."""
    role = "system" if message.role == "developer" else message.role
    document: Message = {"role": role, "content": content_text(message.content or "")}
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        document |= {"reasoning_content": reasoning, "thinking": reasoning}
    if message.tool_calls:
        document["tool_calls"] = [_call_document(call, tools) for call in message.tool_calls]
        if tools is not None and tools.null_content and not document["content"]:
            document["content"] = None
    if message.role == "tool":
        name = message.name or (names or {}).get(message.tool_call_id or "", "")
        document |= {"tool_call_id": _call_id(message.tool_call_id, tools), **({"name": name} if name else {})}
    return document


def instructions_as_user_text(messages: Sequence[Message]) -> list[Message]:
    """The messages with instructions after the start as text of the user, for templates that take them nowhere else.

    Turns of the user that follow one another become one: such templates want turns that alternate.
    """
    changed: list[Message] = []
    for message in messages:
        before = changed[-1]["role"] if changed else None
        if message["role"] == "system" and before not in (None, "system"):
            message = {**message, "role": "user"}
        if message["role"] == before and before in ("system", "user"):
            changed[-1] = {**changed[-1], "content": f"{changed[-1]['content']}\n\n{message['content']}"}
        else:
            changed.append(message)
    return changed


def messages_with_tools(messages: Sequence[ChatMessage], offer: ToolOffer | None) -> list[Message]:
    """Messages for a template that takes no tools."""
    documents = [_written_message(message) for message in messages]
    if offer is None:
        return documents
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in offer.documents)
    text = TOOLS_TEXT.format(tools=lines)
    if documents[0]["role"] == "system":
        return [{"role": "system", "content": f"{documents[0]['content']}\n\n{text}"}, *documents[1:]]
    return [{"role": "system", "content": text}, *documents]


def _written_message(message: ChatMessage) -> Message:
    """Calls and results as text; results come from the user, because every template has that role."""
    document = template_message(message)
    if message.role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{document['content']}\n</tool_response>"}
    calls = [_written_call(call) for call in message.tool_calls or ()]
    content = "\n".join(part for part in (document["content"], *calls) if part)
    return {"role": document["role"], "content": content}


def _written_call(call: ToolCallParam) -> str:
    arguments = json.dumps(call_arguments(call), ensure_ascii=False)
    return f"<tool_call>\n{call_text(call.function.name, arguments)}\n</tool_call>"


def call_names(messages: Sequence[ChatMessage]) -> dict[str, str]:
    """The functions that were called, by the ids of the calls."""
    calls = [call for message in messages for call in message.tool_calls or ()]
    return {call.id: call.function.name for call in calls if call.id}


def call_arguments(call: ToolCallParam) -> Any:
    """The arguments of a call as an object. What a model wrote wrongly stays text."""
    arguments = call.function.arguments
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments


def _call_document(call: ToolCallParam, tools: ToolFormat | None) -> dict[str, Any]:
    arguments = call_arguments(call)
    if tools is not None and tools.text_arguments and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": _call_id(call.id, tools), "type": "function", "function": function}


def _call_id(call_id: str | None, tools: ToolFormat | None) -> str:
    """The id as the family's templates take it: some refuse ids that are longer or shorter than theirs."""
    text = call_id or ""
    length = tools.id_length if tools else None
    return text if length is None else text[-length:].rjust(length, "0")
