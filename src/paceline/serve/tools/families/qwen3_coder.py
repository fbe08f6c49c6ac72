"""Qwen 3 Coder: <tool_call><function=name><parameter=key>value</parameter></function></tool_call>."""

from __future__ import annotations

from paceline.serve.output_pieces import ContentText, Parse, Pieces, ToolCallName
from paceline.serve.text_stream import TextStream
from paceline.serve.tools.grammar import CallLayout, json_prefix
from paceline.serve.tools.json_calls import call_object
from paceline.serve.tools.offer import ToolFunction, ToolOffer
from paceline.serve.tools.registry import ToolFormat
from paceline.serve.tools.tagged_calls import ArgumentWriter

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"


def parse(offer: ToolOffer) -> Parse:
    def pieces(stream: TextStream) -> Pieces:
        while (yield from stream.pieces_until((OPEN, FUNCTION), ContentText)):
            yield from stream.take((OPEN,))
            if (yield from stream.skip_blanks()) == "{":  # a forced call is JSON
                yield from call_object(stream)
            elif (yield from stream.take((FUNCTION,))):
                yield from _call(stream, offer)
            yield from stream.skip_blanks()
            yield from stream.take((CLOSE,))

    return pieces


def _call(stream: TextStream, offer: ToolOffer) -> Pieces:
    start = stream.position
    name = yield from stream.text_until((">",))
    if name is None:
        yield ContentText(stream.since(start))
        return
    stream.position += 1
    yield ToolCallName(name.strip())
    function = offer.function(name.strip())
    arguments, borders = ArgumentWriter(function), _borders(function)
    yield from stream.skip_blanks()
    while (yield from stream.take((PARAMETER,))):
        key = yield from stream.text_until((">",))
        stream.position += 1
        value = yield from stream.text_until(borders)
        if key is None or value is None:
            return
        yield from stream.take((PARAMETER_END,))
        yield arguments.member(key.strip(), value.removeprefix("\n").removesuffix("\n"))
        yield from stream.skip_blanks()
    yield arguments.close()
    yield from stream.take((FUNCTION_END,))


def _borders(function: ToolFunction) -> tuple[str, ...]:
    """What ends a value. Models forget its end tag now and then: then the next argument or the call's end does."""
    return (PARAMETER_END, f"{FUNCTION_END}\n{CLOSE}", *(f"{PARAMETER}{key}>" for key in function.properties))


def matches(template: str) -> bool:
    return FUNCTION in template


FORMAT = ToolFormat(
    "qwen3_coder",
    matches,
    parse,
    CallLayout(json_prefix(before=f"{OPEN}\n"), f"}}\n{CLOSE}"),
    markers=(OPEN, CLOSE),
    aliases=("qwen3_xml",),
)
