"""Tool calls whose arguments are written one by one between tags, as plain text. The schema tells their types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.serve.output_pieces import OutputPiece, ToolArguments
from paceline.serve.tools.offer import ToolFunction

PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}
NULLS = ("null", "None")
COMBINATIONS = ("anyOf", "oneOf", "allOf")
MAX_DEPTH = 16  # of a schema that refers to itself


class ArgumentWriter:
    """Turns arguments into the members of a JSON object, one after the other."""

    def __init__(self, function: ToolFunction) -> None:
        self._function = function
        self._is_first = True

    def member(self, key: str, text: str) -> OutputPiece:
        """The text of one more argument."""
        opening = "{" if self._is_first else ", "
        self._is_first = False
        schema = self._function.properties.get(key)
        value = json.dumps(argument_value(text, schema, self._function.parameters), ensure_ascii=False)
        return ToolArguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: {value}")

    def close(self) -> OutputPiece:
        """The end of the object."""
        return ToolArguments("{}" if self._is_first else "}")


def argument_value(text: str, schema: Any, parameters: Any = None) -> Any:
    """The value that a text stands for: itself where its schema takes strings, else JSON where it is JSON.

    parameters  the schema of all arguments, which may hold definitions
    """
    if takes_string(text, schema, parameters):
        return text
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)  # NaN, and numbers that are too large for a float, are no JSON
    except (ValueError, RecursionError):
        return PYTHON_CONSTANTS.get(text.strip(), text)
    return value


def takes_string(text: str, schema: Any, parameters: Any, depth: int = 0) -> bool:
    """Whether the schema takes this text as a string. What says null in a schema that takes it is no string."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return False
    if "$ref" in schema:
        return takes_string(text, _definition(schema["$ref"], parameters), parameters, depth + 1)
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return isinstance(values, list) and text in values
    parts = [part for name in COMBINATIONS if isinstance(schema.get(name), list) for part in schema[name]]
    types = schema["type"] if isinstance(schema.get("type"), list) else [schema.get("type")]
    if text.strip() in NULLS and ("null" in types or {"type": "null"} in parts):
        return False
    return "string" in types or any(takes_string(text, part, parameters, depth + 1) for part in parts)


def _definition(reference: Any, parameters: Any) -> Any:
    """What a reference inside the schema of the arguments points to."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    definition = parameters
    for name in reference.removeprefix("#/").split("/"):
        definition = definition.get(name) if isinstance(definition, Mapping) else None
    return definition
