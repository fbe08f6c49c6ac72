"""Mistral: [TOOL_CALLS] and a list of objects, or in newer tokenizers [TOOL_CALLS]name[ARGS]{…} for each call."""

from __future__ import annotations

from paceline.serve.output_pieces import ContentText, Parse, Pieces, ToolArguments, ToolCallName
from paceline.serve.text_stream import TextStream
from paceline.serve.tools.grammar import CallLayout, json_prefix
from paceline.serve.tools.json_calls import NO_ARGUMENTS, CallPieces, call_object, stream_arguments
from paceline.serve.tools.offer import ToolOffer
from paceline.serve.tools.registry import ToolFormat

CALLS, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
ID_LENGTH = 9  # Mistral's templates take ids of this length and refuse others


def parse(offer: ToolOffer) -> Parse:
    def pieces(stream: TextStream) -> Pieces:
        while (yield from stream.pieces_until((CALLS,), ContentText)):
            while (yield from stream.take((CALLS,))):  # some models repeat it
                yield from stream.skip_blanks()
            if (yield from stream.next_character()) in ("[", "{"):
                yield from _objects(stream)
            else:
                yield from _named(stream, offer)

    return pieces


def _objects(stream: TextStream) -> Pieces:
    """The calls of a list, or one call. What begins without a call is content."""
    start = stream.position
    is_list = bool((yield from stream.take(("[",))))
    if (yield from stream.skip_blanks()) != "{":
        stream.position = start
        yield from stream.pieces_until((CALLS,), ContentText)
        return
    is_call = yield from call_object(stream)
    while is_call and (yield from _next_entry(stream, is_list)):
        pass


def _next_entry(stream: TextStream, is_list: bool) -> CallPieces:
    """What follows a call; returns whether more may follow. What is no call in a list is left out."""
    start = stream.position
    yield from stream.skip_blanks()
    yield from stream.take((",",))
    character = yield from stream.skip_blanks()
    if character == "{":
        return (yield from call_object(stream))
    if not is_list:
        stream.position = start
        return False
    return not (yield from stream.take(("]",))) and (yield from stream.json_value()) is not None


def _named(stream: TextStream, offer: ToolOffer) -> Pieces:
    """A name, sometimes an id of the model's own, and the arguments. Words before a list are no name."""
    start = stream.position
    name = yield from stream.text_until((CALL_ID, ARGUMENTS, "{"))
    if name is not None and name.rstrip().endswith("["):
        stream.position = start + name.rindex("[")
        yield from _objects(stream)
        return
    if name is not None and (yield from stream.take((CALL_ID,))):
        yield from stream.text_until((ARGUMENTS, "{"))
    if name is None and stream.since(start).strip() in offer.names:
        yield ToolCallName(stream.since(start).strip())
        yield ToolArguments(NO_ARGUMENTS)
        return
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
