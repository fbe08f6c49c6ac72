"""Mistral: [TOOL_CALLS] and a list of objects, or in newer tokenizers [TOOL_CALLS]name[ARGS]{…} for each call."""

from __future__ import annotations

from paceline.serve.output_pieces import ContentText, Parse, Pieces, ToolArguments, ToolCallName
from paceline.serve.text_stream import TextStream, Waiting, json_string
from paceline.serve.tools.grammar import CallLayout, json_prefix
from paceline.serve.tools.json_calls import (
    ARGUMENT_KEYS,
    NAME_KEYS,
    NO_ARGUMENTS,
    CallPieces,
    call_object,
    stream_arguments,
)
from paceline.serve.tools.offer import ToolOffer
from paceline.serve.tools.registry import ToolFormat

CALLS, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
ID_LENGTH = 9  # Mistral's templates take ids of this length and refuse others


def parse(offer: ToolOffer) -> Parse:
    def pieces(stream: TextStream) -> Pieces:
        start = stream.position
        while (yield from stream.pieces_until((CALLS,), ContentText)):
            before = stream.since(start).split()[-1:]
            while (yield from stream.take((CALLS,))):  # some models repeat it
                yield from stream.skip_blanks()
            yield from _calls(stream, offer, before[0] if before else "")
            start = stream.position

    return pieces


def _calls(stream: TextStream, offer: ToolOffer, before: str) -> Pieces:
    """What follows the mark. before: the word in front of it, where some models write the name."""
    if before in offer.names and (yield from _opens_arguments(stream)):
        yield ToolCallName(before)
        yield from stream_arguments(stream)
    elif (yield from stream.next_character()) in ("[", "{"):
        yield from _objects(stream)
    else:
        yield from _named(stream, offer)


def _opens_arguments(stream: TextStream) -> Waiting[bool]:
    """Whether arguments come next and no object that names its function. Nothing of them is read."""
    if (yield from stream.take((ARGUMENTS,))):
        return (yield from stream.skip_blanks()) == "{"
    if (yield from stream.next_character()) != "{":
        return False
    start = stream.position
    stream.position += 1
    character = yield from stream.skip_blanks()
    key = json_string((yield from stream.json_value())) if character == '"' else None
    stream.position = start
    return character == "}" or (key is not None and key not in (*NAME_KEYS, *ARGUMENT_KEYS))


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
    yield from stream.text_until((CALL_ID, ARGUMENTS, CALLS, "{"))
    name = stream.since(start).strip()
    character = yield from _argument_start(stream)
    if character == "{" and name.endswith("["):
        stream.position = start + stream.since(start).rindex("[")
        yield from _objects(stream)
    elif character == "{" and len(name.split()) == 1:
        yield ToolCallName(name)
        yield from stream_arguments(stream)
    elif character != "{" and name in offer.names:
        yield ToolCallName(name)
        yield ToolArguments(NO_ARGUMENTS)
    else:
        yield ContentText(stream.since(start))


def _argument_start(stream: TextStream) -> Waiting[str]:
    """Read the marks between a name and its arguments; returns the character after them."""
    if (yield from stream.take((CALL_ID, ARGUMENTS))) == CALL_ID:
        yield from stream.text_until((ARGUMENTS, CALLS, "{"))
        yield from stream.take((ARGUMENTS,))
    return (yield from stream.skip_blanks())


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
