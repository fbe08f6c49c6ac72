"""Calls as a Python list, [name(key=value), …]: Llama 4, ToolACE and others. The list is the whole output."""

from __future__ import annotations

import ast
import json

from paceline.serve.output_pieces import ContentText, Parse, Pieces, ToolArguments, ToolCallName
from paceline.serve.text_stream import TextStream, Waiting
from paceline.serve.tools.grammar import CallLayout, json_prefix
from paceline.serve.tools.json_calls import call_object
from paceline.serve.tools.offer import ToolOffer
from paceline.serve.tools.registry import ToolFormat

START, END = "<|python_start|>", "<|python_end|>"
BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


def parse(offer: ToolOffer) -> Parse:
    def pieces(stream: TextStream) -> Pieces:
        start = stream.position
        yield from stream.skip_blanks()
        yield from stream.take((START,))
        character = yield from stream.skip_blanks()
        if character == "{":  # a forced call is JSON
            yield from call_object(stream, offer.names)
        elif character == "[":
            yield from _calls(stream, offer, start)
            yield from stream.take((END,))
        else:
            stream.position = start
        yield from stream.pieces_until((), ContentText)

    return pieces


def _calls(stream: TextStream, offer: ToolOffer, start: int) -> Pieces:
    """The calls of a list. What is no call is content, from where the last call ended."""
    stream.position += 1
    while True:
        yield from stream.skip_blanks()
        text = yield from _call_text(stream)
        call = read_call(text, offer) if text is not None else None
        if call is None:
            stream.position = start
            return
        yield ToolCallName(call[0])
        yield ToolArguments(call[1])
        start = stream.position
        character = yield from stream.skip_blanks()
        stream.position += len(character)
        if character != ",":
            return


def _call_text(stream: TextStream) -> Waiting[str | None]:
    """Read up to the bracket that closes the first one; None: the text ends before."""
    start, depth, quote = stream.position, 0, ""
    while True:
        character = yield from stream.next_character()
        if not character:
            return None
        stream.position += 1
        if quote:
            if character == "\\":
                yield from stream.next_character()
                stream.position += 1
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in BRACKETS:
            depth += BRACKETS[character]
            if depth <= 0:
                return stream.since(start)


def read_call(text: str, offer: ToolOffer) -> tuple[str, str] | None:
    """Name and arguments of `name(key=value)`; None: it is no call of an offered function."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or call.args or ast.unparse(call.func) not in offer.names:
            return None
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        return ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def matches(template: str) -> bool:
    return START in template or "func_name1(" in template


FORMAT = ToolFormat(
    "pythonic",
    matches,
    parse,
    CallLayout(json_prefix("parameters"), "}", between=None),
    markers=(START, END),
)
