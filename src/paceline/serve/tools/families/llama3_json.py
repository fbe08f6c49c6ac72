"""Llama 3.1 to 3.3: the whole output is {"name": …, "parameters": {…}}, several of them separated by semicolons."""

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
        start = stream.position
        yield from stream.skip_blanks()
        yield from stream.take((PYTHON_TAG,))
        while (yield from stream.skip_blanks()) == "{":
            if not (yield from call_object(stream, offer.names)):
                break
            start = stream.position
            yield from stream.skip_blanks()
            yield from stream.take(SEPARATORS)
        else:
            stream.position = start
        yield from stream.pieces_until((), ContentText)

    return pieces


def matches(template: str) -> bool:
    return PYTHON_TAG in template or '"parameters": dictionary' in template


FORMAT = ToolFormat(
    "llama3_json",
    matches,
    parse,
    CallLayout(json_prefix("parameters"), "}", between="; "),
    markers=(PYTHON_TAG,),
)
