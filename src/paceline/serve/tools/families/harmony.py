"""gpt-oss: messages with a channel each. Analysis is reasoning; a message to functions.name is a call of it."""

from __future__ import annotations

import re
from collections.abc import Callable

from paceline.serve.output_pieces import (
    ContentText,
    OutputPiece,
    Parse,
    Pieces,
    ReasoningText,
    ToolArguments,
    ToolCallName,
)
from paceline.serve.text_stream import TextStream
from paceline.serve.tools.grammar import CallLayout
from paceline.serve.tools.json_calls import NO_ARGUMENTS
from paceline.serve.tools.offer import ToolOffer
from paceline.serve.tools.registry import ToolFormat

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
NO_FUNCTIONS = re.compile(r"assistant|(python|browser|container)(\..*)?")  # whom the model addresses unasked
FINAL = f"{CHANNEL}final"


def parse(offer: ToolOffer) -> Parse:
    def pieces(stream: TextStream) -> Pieces:
        if (yield from stream.skip_blanks()) not in ("<", "t", ""):  # no message header
            yield from stream.pieces_until(ENDS, ContentText)
            return
        texts: set[Callable[[str], OutputPiece]] = set()
        while (yield from stream.skip_blanks()):
            yield from _message(stream, texts)
            yield from stream.take(ENDS)

    return pieces


def _message(stream: TextStream, texts: set[Callable[[str], OutputPiece]]) -> Pieces:
    """One message. texts: the kinds of text there have been; another message of a kind begins on a line of its own."""
    start = stream.position
    header = yield from stream.text_until((MESSAGE,))
    if header is None:
        yield ContentText(_without_header(stream.since(start)))
        return
    yield from stream.take((MESSAGE,))
    recipient = RECIPIENT.search(header)
    if recipient:
        yield from _call(stream, recipient.group(1))
        return
    kind: Callable[[str], OutputPiece] = ReasoningText if "analysis" in header else ContentText
    if kind in texts:
        yield kind("\n")
    texts.add(kind)
    yield from stream.pieces_until((*ENDS, START), kind)


def _call(stream: TextStream, name: str) -> Pieces:
    is_call = NO_FUNCTIONS.fullmatch(name) is None
    if is_call:
        yield ToolCallName(name)
    start = stream.position
    for piece in stream.pieces_until((*ENDS, START), ToolArguments):
        if is_call or piece is None:
            yield piece
    if is_call and stream.position == start:
        yield ToolArguments(NO_ARGUMENTS)


def _without_header(text: str) -> str:
    """What a message says that ends before its text began: nothing, unless the model has left the mark out."""
    if FINAL in text:
        return re.split("|".join(map(re.escape, ENDS)), text.partition(FINAL)[2])[0].lstrip()
    return "" if CHANNEL in text or text.startswith("<|") else text


def matches(template: str) -> bool:
    return CHANNEL in template and MESSAGE in template


FORMAT = ToolFormat(
    "harmony",
    matches,
    parse,
    CallLayout(lambda name: f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}", "", between=None),
    markers=(START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS),
    aliases=("openai",),
)
