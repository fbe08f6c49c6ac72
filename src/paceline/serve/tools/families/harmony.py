"""gpt-oss: messages with a channel each. Analysis is reasoning; a message to functions.name is a call of it."""

from __future__ import annotations

import re

from paceline.serve.output_pieces import ContentText, Parse, Pieces, ReasoningText, ToolArguments, ToolCallName
from paceline.serve.text_stream import TextStream
from paceline.serve.tools.grammar import CallLayout
from paceline.serve.tools.offer import ToolOffer
from paceline.serve.tools.registry import ToolFormat

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


def parse(offer: ToolOffer) -> Parse:
    def pieces(stream: TextStream) -> Pieces:
        if (yield from stream.skip_blanks()) not in ("<", "t", ""):  # no message header
            yield from stream.pieces_until(ENDS, ContentText)
            return
        while (yield from stream.skip_blanks()):
            yield from _message(stream)
            yield from stream.take(ENDS)

    return pieces


def _message(stream: TextStream) -> Pieces:
    start = stream.position
    header = yield from stream.text_until((MESSAGE,))
    if header is None:
        text = stream.since(start)
        yield ContentText("" if CHANNEL in text or text.startswith("<|") else text)
        return
    yield from stream.take((MESSAGE,))
    recipient = RECIPIENT.search(header)
    if recipient:
        yield ToolCallName(recipient.group(1))
        yield from stream.pieces_until((*ENDS, START), ToolArguments)
    elif "analysis" in header:
        yield from stream.pieces_until((*ENDS, START), ReasoningText)
    else:
        yield from stream.pieces_until((*ENDS, START), ContentText)


def matches(template: str) -> bool:
    return CHANNEL in template and MESSAGE in template


FORMAT = ToolFormat(
    "harmony",
    matches,
    parse,
    CallLayout(lambda name: f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}", "", between=None),
    markers=(START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS),
)
