"""Mistral: [TOOL_CALLS] and a list of objects, or in newer tokenizers [TOOL_CALLS]name[ARGS]{…} for each call."""

from __future__ import annotations

from paceline.serve.output_pieces import ContentText, Parse, Pieces, ToolCallName
from paceline.serve.text_stream import TextStream
from paceline.serve.tools.grammar import CallLayout, json_prefix
from paceline.serve.tools.json_calls import call_object, stream_arguments
from paceline.serve.tools.offer import ToolOffer
from paceline.serve.tools.registry import ToolFormat

CALLS, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
ID_LENGTH = 9  # Mistral's templates take ids of this length and refuse others


def parse(offer: ToolOffer) -> Parse:
    def pieces(stream: TextStream) -> Pieces:
        while (yield from stream.pieces_until((CALLS,), ContentText)):
            yield from stream.take((CALLS,))
            if (yield from stream.skip_blanks()) in ("[", "{"):
                yield from _objects(stream)
            else:
                yield from _named(stream)

    return pieces


def _objects(stream: TextStream) -> Pieces:
    """The calls of a list, or one call."""
    yield from stream.take(("[",))
    while (yield from stream.skip_blanks()) == "{":
        yield from call_object(stream)
        yield from stream.skip_blanks()
        yield from stream.take((",",))
    yield from stream.take(("]",))


def _named(stream: TextStream) -> Pieces:
    """A name, sometimes an id of the model's own, and the arguments."""
    start = stream.position
    name = yield from stream.text_until((CALL_ID, ARGUMENTS, "{"))
    if name is not None and (yield from stream.take((CALL_ID,))):
        yield from stream.text_until((ARGUMENTS, "{"))
    if name is None or not name.strip():
        yield ContentText(stream.since(start))
        return
    yield ToolCallName(name.strip())
    yield from stream.take((ARGUMENTS,))
    yield from stream.skip_blanks()
    yield from stream_arguments(stream)


def matches(template: str) -> bool:
    return CALLS in template


FORMAT = ToolFormat(
    "mistral",
    matches,
    parse,
    CallLayout(json_prefix(), "}", begin=f"{CALLS}[", end="]", between=", "),
    markers=(CALLS, CALL_ID, ARGUMENTS),
    id_length=ID_LENGTH,
)
