"""Hermes, Qwen 2.5, Qwen 3: <tool_call>{"name": …, "arguments": {…}}</tool_call>, once for each call."""

from __future__ import annotations

from paceline.serve.output_pieces import ContentText, Parse, Pieces
from paceline.serve.text_stream import TextStream
from paceline.serve.tools.grammar import CallLayout, json_prefix
from paceline.serve.tools.json_calls import call_object, skip_braces
from paceline.serve.tools.offer import ToolOffer
from paceline.serve.tools.registry import ToolFormat

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def parse(offer: ToolOffer) -> Parse:
    def pieces(stream: TextStream) -> Pieces:
        while (yield from stream.pieces_until((OPEN,), ContentText)):
            yield from stream.take((OPEN,))
            if not (yield from call_object(stream)):
                yield from stream.pieces_until((CLOSE, OPEN), ContentText)
            yield from skip_braces(stream)
            yield from stream.take((CLOSE,))

    return pieces


def matches(template: str) -> bool:
    return OPEN in template and "<arg_key>" not in template and "<function=" not in template


FORMAT = ToolFormat(
    "hermes",
    matches,
    parse,
    CallLayout(json_prefix(before=f"{OPEN}\n"), f"}}\n{CLOSE}"),
    markers=(OPEN, CLOSE),
)
