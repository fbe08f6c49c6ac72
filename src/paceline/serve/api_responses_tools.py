"""Tools of /v1/responses as functions, which is all that chat templates know, and calls of them back.

function   as it is
namespace  its tools, with its name before theirs
custom     a function with one argument, the text that the tool takes
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.serve.api_chat import string_of
from paceline.serve.api_shape import Json
from paceline.serve.errors import ApiError

SEPARATOR = "__"  # between a namespace and a name
INPUT = "input"  # the argument of the function that stands for a custom tool
INPUT_SCHEMA: Json = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
INPUT_OPENING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
# Characters of a JSON string and escapes that are complete; the escapes of a surrogate pair count as one.
WHOLE_CHARACTERS = re.compile(
    r'(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*"
)


@dataclass(frozen=True, slots=True)
class CalledTool:
    """What a call of a function stands for."""

    name: str
    namespace: str | None = None
    is_custom: bool = False

    @property
    def function_name(self) -> str:
        return function_name(self.name, self.namespace)

    @property
    def fields(self) -> Json:
        """Those that name the tool in an item."""
        return {"name": self.name} | ({"namespace": self.namespace} if self.namespace else {})


def function_name(name: str, namespace: Any) -> str:
    """What the model calls a tool."""
    return f"{namespace}{SEPARATOR}{name}" if namespace else name


class ResponseTools:
    """The tools of one request. Raises ApiError 400 for a kind that is not a client's own.

    functions  as the chat request offers them
    """

    def __init__(self, tools: list[Json]) -> None:
        self.functions: list[Json] = []
        self._tools: dict[str, CalledTool] = {}
        for index, tool in enumerate(tools):
            self._add(tool, f"tools.{index}", None)

    def called(self, name: str | None) -> CalledTool:
        """The tool that a function of this name stands for."""
        return self._tools.get(name or "", CalledTool(name or ""))

    def _add(self, tool: Json, param: str, namespace: str | None) -> None:
        kind = tool.get("type")
        if kind == "namespace" and namespace is None:
            for place, inner in _inner_tools(tool, param):
                self._add(inner, place, string_of(tool, "name", param))
            return
        if kind not in ("function", "custom"):
            message = f"{param} is a tool of type {str(kind)[:40]!r}; this server has functions and custom tools"
            raise ApiError(400, message, param=param, code="unsupported_parameter")
        called = CalledTool(string_of(tool, "name", param), namespace, kind == "custom")
        self._tools[called.function_name] = called
        fields = _custom_fields(tool, param) if called.is_custom else tool
        function = {name: fields[name] for name in FUNCTION_FIELDS if fields.get(name) is not None}
        self.functions.append({"type": "function", "function": function | {"name": called.function_name}})


def _inner_tools(tool: Json, param: str) -> Iterator[tuple[str, Json]]:
    tools = tool.get("tools")
    if not isinstance(tools, list) or not all(isinstance(inner, dict) for inner in tools):
        raise ApiError(400, f"{param}.tools must be a list of tools", param=f"{param}.tools")
    for index, inner in enumerate(tools):
        yield f"{param}.tools.{index}", inner


def _custom_fields(tool: Json, param: str) -> Json:
    layout = tool.get("format") or {"type": "text"}
    if not isinstance(layout, dict) or layout.get("type") != "text":
        message = f"{param}.format must be of type 'text': a custom tool of this server takes any text"
        raise ApiError(400, message, param=f"{param}.format", code="unsupported_parameter")
    return {"description": tool.get("description"), "parameters": INPUT_SCHEMA}


def custom_arguments(text: str) -> str:
    """The arguments of the function that stands for a custom tool."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


class CustomInput:
    """The text that a custom tool is called with, out of arguments that arrive in parts."""

    def __init__(self) -> None:
        self._arguments, self._position = "", 0
        self._text = ""

    def feed(self, part: str) -> str:
        """The characters that these arguments complete."""
        self._arguments += part
        if not self._position:
            opening = INPUT_OPENING.match(self._arguments)
            self._position = opening.end() if opening else 0
        if not self._position:
            return ""
        start = self._position
        characters = WHOLE_CHARACTERS.match(self._arguments, start)
        self._position = characters.end() if characters else start
        text = str(json.loads(f'"{self._arguments[start : self._position]}"', strict=False))
        self._text += text
        return text

    def whole(self) -> str:
        """All of the text. Arguments that are not as they should be are the text themselves."""
        try:
            value = json.loads(self._arguments, strict=False)
        except (ValueError, RecursionError):
            return self._text or self._arguments
        text = value.get(INPUT) if isinstance(value, dict) else None
        return text if isinstance(text, str) else self._arguments
