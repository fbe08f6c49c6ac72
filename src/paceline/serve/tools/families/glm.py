"""GLM 4.5 and later: <tool_call>name, then <arg_key>key</arg_key><arg_value>value</arg_value> for each argument."""

from __future__ import annotations

from paceline.serve.output_pieces import ContentText, Parse, Pieces, ToolCallName
from paceline.serve.text_stream import TextStream
from paceline.serve.tools.grammar import CallLayout, json_prefix
from paceline.serve.tools.json_calls import call_object
from paceline.serve.tools.offer import ToolOffer
from paceline.serve.tools.registry import ToolFormat
from paceline.serve.tools.tagged_calls import ArgumentWriter

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"


def parse(offer: ToolOffer) -> Parse:
    def pieces(stream: TextStream) -> Pieces:
        while (yield from stream.pieces_until((OPEN,), ContentText)):
            yield from stream.take((OPEN,))
            if (yield from stream.skip_blanks()) == "{":  # a forced call is JSON
                yield from call_object(stream)
            else:
                yield from _call(stream, offer)
            yield from stream.skip_blanks()
            yield from stream.take((CLOSE,))

    return pieces


def _call(stream: TextStream, offer: ToolOffer) -> Pieces:
    start = stream.position
    name = yield from stream.text_until(("\n", KEY, CLOSE))
    if name is None or not name.strip():
        yield ContentText(stream.since(start))
        return
    yield ToolCallName(name.strip())
    arguments = ArgumentWriter(offer.function(name.strip()))
    yield from stream.skip_blanks()
    while (yield from stream.take((KEY,))):
        key = yield from stream.text_until((KEY_END,))
        yield from stream.text_until((VALUE,))
        yield from stream.take((VALUE,))
        value = yield from stream.text_until((VALUE_END,))
        if key is None or value is None:
            return
        yield from stream.take((VALUE_END,))
        yield arguments.member(key.strip(), value)
        yield from stream.skip_blanks()
    yield arguments.close()


def matches(template: str) -> bool:
    return KEY in template


FORMAT = ToolFormat(
    "glm",
    matches,
    parse,
    CallLayout(json_prefix(before=f"{OPEN}\n"), f"}}\n{CLOSE}"),
    markers=(OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END),
    aliases=("glm45", "glm47"),
)
