"""Tool calls whose arguments are written one by one between tags, as plain text. The schema tells their types."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.serve.output_pieces import OutputPiece, ToolArguments
from paceline.serve.tools.offer import ToolFunction


class ArgumentWriter:
    """Turns arguments into the members of a JSON object, one after the other."""

    def __init__(self, function: ToolFunction) -> None:
        self._function = function
        self._is_first = True

    def member(self, key: str, text: str) -> OutputPiece:
        """The text of one more argument."""
        opening = "{" if self._is_first else ", "
        self._is_first = False
        value = json.dumps(argument_value(text, self._function.properties.get(key)), ensure_ascii=False)
        return ToolArguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: {value}")

    def close(self) -> OutputPiece:
        """The end of the object."""
        return ToolArguments("{}" if self._is_first else "}")


def argument_value(text: str, schema: Any) -> Any:
    """The value that a text stands for: itself where its schema says string, else JSON where it is JSON."""
    types = schema.get("type") if isinstance(schema, Mapping) else None
    if types == "string" or (isinstance(types, list) and "string" in types):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)
