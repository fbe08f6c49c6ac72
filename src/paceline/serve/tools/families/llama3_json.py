"""Llama 3.1 to 3.3: {"name": …, "parameters": {…}}, several of them separated by semicolons, also between sentences."""

from __future__ import annotations

from paceline.serve.output_pieces import ContentText, Parse, Pieces
from paceline.serve.text_stream import TextStream
from paceline.serve.tools.grammar import CallLayout, json_prefix
from paceline.serve.tools.json_calls import call_object
from paceline.serve.tools.offer import ToolOffer
from paceline.serve.tools.registry import ToolFormat

PYTHON_TAG = "<|python_tag|>"
SEPARATORS = (";", ",")


def parse(offer: ToolOffer) -> Parse:
    def pieces(stream: TextStream) -> Pieces:
        while (yield from stream.pieces_until((PYTHON_TAG, "{"), ContentText)):
            start = stream.position
            yield from stream.take((PYTHON_TAG,))
            if (yield from stream.skip_blanks()) != "{":
                yield ContentText(stream.since(start))
            elif (yield from call_object(stream, offer.names, needs_arguments=True)):
                yield from _separator(stream)

    return pieces


def _separator(stream: TextStream) -> Pieces:
    """What stands between two calls. Blanks before a sentence belong to the sentence."""
    start = stream.position
    yield from stream.skip_blanks()
    if not (yield from stream.take(SEPARATORS)):
        stream.position = start


def matches(template: str) -> bool:
    return PYTHON_TAG in template or '"parameters": dictionary' in template


FORMAT = ToolFormat(
    "llama3_json",
    matches,
    parse,
    CallLayout(json_prefix("parameters"), "}", between="; "),
    markers=(PYTHON_TAG,),
    aliases=("llama4_json",),
)
