"""Tool calls written as JSON objects: {"name": …, "arguments": {…}}. Arguments are passed on while they are written."""

from __future__ import annotations

import json
from collections.abc import Container, Generator, Iterator
from dataclasses import dataclass

from paceline.serve.output_pieces import ContentText, OutputPiece, ToolArguments, ToolCallName
from paceline.serve.text_stream import TextStream, Waiting, json_string

NAME_KEYS = ("name",)
ARGUMENT_KEYS = ("arguments", "parameters")
NO_ARGUMENTS = "{}"
CallPieces = Generator[OutputPiece | None, None, bool]


@dataclass(slots=True)
class _Call:
    """What is known of a call while its object is read."""

    name: str | None = None
    arguments: str | None = None  # read before the name
    is_announced: bool = False


def call_object(
    stream: TextStream, names: Container[str] | None = None, *, needs_arguments: bool = False
) -> CallPieces:
    """Read one object; returns whether it is a call. What is no call is content, as it is written.

    names            functions that may be called; None: any
    needs_arguments  an object without arguments is no call
    """
    start, call = stream.position, _Call()
    is_complete = yield from _members(stream, call, names)
    if is_complete and call.name is not None and not call.is_announced and not needs_arguments:
        yield from _announce(call, call.name, NO_ARGUMENTS)
    if not call.is_announced:
        yield ContentText(stream.since(start))
    return call.is_announced


def _announce(call: _Call, name: str, arguments: str = "") -> Iterator[OutputPiece]:
    """The call begins: only now, because what has a name and no arguments that are JSON is no call."""
    call.is_announced = True
    yield ToolCallName(name)
    yield ToolArguments(arguments)


def _members(stream: TextStream, call: _Call, names: Container[str] | None) -> CallPieces:
    """Read the members of an object; returns whether it is complete."""
    if (yield from _take(stream, "{")) is False:
        return False
    while True:
        key = yield from _key(stream)
        if key is None:
            return False
        if not (yield from _member(stream, key, call, names)):
            return False
        character = yield from stream.skip_blanks()
        if character not in (",", "}"):  # a brace that was forgotten: what comes now does not belong to the object
            return False
        stream.position += 1
        if character == "}":
            return True


def _member(stream: TextStream, key: str, call: _Call, names: Container[str] | None) -> CallPieces:
    if key in NAME_KEYS:
        return (yield from _name(stream, call, names))
    if key in ARGUMENT_KEYS:
        return (yield from _arguments(stream, call))
    return (yield from stream.json_value()) is not None


def _name(stream: TextStream, call: _Call, names: Container[str] | None) -> CallPieces:
    name = json_string((yield from stream.json_value()))
    if not name or (names is not None and name not in names):
        return False
    call.name = name
    if call.arguments is not None:
        yield from _announce(call, name, call.arguments)
    return True


def _arguments(stream: TextStream, call: _Call) -> CallPieces:
    """Pass an object on as it arrives. Other values, and those before the name, wait until they are complete."""
    character = yield from stream.next_character()
    if character == "{" and call.name is not None:
        if not (yield from stream.opens_object()):
            return False
        yield from _announce(call, call.name)
        return (yield from stream_arguments(stream))
    value = yield from stream.json_value()
    if value is None:
        return False
    call.arguments = argument_text(value)
    if call.name is not None:
        yield from _announce(call, call.name, call.arguments)
    return True


def stream_arguments(stream: TextStream) -> CallPieces:
    """Yield a JSON value as arguments while it arrives; returns whether it is complete."""
    is_complete = False
    for piece in stream.json_pieces(ToolArguments):
        is_complete = piece is not None and not piece.text
        if not is_complete:
            yield piece
    return is_complete


def argument_text(value: str) -> str:
    """Arguments as JSON text. Some models write them as a string that holds JSON, or null for none."""
    text = json_string(value)
    text = value if text is None else text.strip()
    return NO_ARGUMENTS if text in ("", "null") else text


def skip_braces(stream: TextStream) -> Waiting[None]:
    """Read blanks, and braces that close nothing: models write one too many now and then."""
    while (yield from stream.skip_blanks()) == "}":
        stream.position += 1


def _key(stream: TextStream) -> Waiting[str | None]:
    """Read `"key":` and the blanks after it."""
    if (yield from stream.skip_blanks()) != '"':
        return None
    key = json_string((yield from stream.json_value()))
    if (yield from _take(stream, ":")) is False:
        return None
    yield from stream.skip_blanks()
    return key


def _take(stream: TextStream, expected: str) -> Waiting[bool]:
    character = yield from stream.skip_blanks()
    if character != expected:
        return False
    stream.position += 1
    return True


def call_text(name: str, arguments: str, key: str = "arguments") -> str:
    """A call as an object."""
    return f'{{"name": {json.dumps(name)}, "{key}": {arguments}}}'
