"""Arguments that are written as plain text: which values they stand for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.serve.tools.offer import ToolFunction
from paceline.serve.tools.tagged_calls import ArgumentWriter

MAYBE_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}  # as pydantic writes `str | None`
MAYBE_NUMBER = {"anyOf": [{"type": "integer"}, {"type": "null"}]}
SELF = {"$ref": "#/$defs/self"}
DEFINITIONS = {"size": {"enum": ["1", "2"]}, "self": SELF}


def written(text: str, schema: Any) -> Any:
    """The value of one argument, as a client reads it."""
    writer = ArgumentWriter(ToolFunction("f", {"properties": {"x": schema}, "$defs": DEFINITIONS}))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    pieces = [writer.member("x", text), writer.close()]
    arguments = "".join(piece.text for piece in pieces)  # type: ignore[union-attr]
    return json.loads(arguments, parse_constant=refuse)["x"]


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": ["string", "null"]}, "None", None),
        ({"type": "string"}, "null", "null"),
        (MAYBE_TEXT, "5", "5"),
        (MAYBE_TEXT, "null", None),
        (MAYBE_NUMBER, "5", 5),
        ({"oneOf": [{"allOf": [{"type": "string"}]}]}, "true", "true"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"const": "1"}, "1", "1"),
        ({"allOf": [{"$ref": "#/$defs/size"}]}, "2", "2"),
        (SELF, "5", 5),
        ({"$ref": "elsewhere"}, "[5]", [5]),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "boolean"}, "True", True),
        (None, "9" * 5000, "9" * 5000),
        (None, "{", "{"),
    ],
)
def test_a_text_stands_for_what_its_schema_takes(schema: Any, text: str, value: Any) -> None:
    assert written(text, schema) == value and type(written(text, schema)) is type(value)
