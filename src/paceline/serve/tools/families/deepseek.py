"""DeepSeek: calls between two marks. V3 and R1 write the arguments as a code block, V3.1 as they are."""

from __future__ import annotations

from paceline.serve.output_pieces import ContentText, Parse, Pieces, ToolCallName
from paceline.serve.text_stream import TextStream
from paceline.serve.tools.grammar import CallLayout
from paceline.serve.tools.json_calls import CallPieces, stream_arguments
from paceline.serve.tools.offer import ToolOffer
from paceline.serve.tools.registry import ToolFormat

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
KIND = "function"  # V3 and R1 write it before the name
FENCE, FENCE_END = "```json\n", "\n```"


def parse(offer: ToolOffer) -> Parse:
    def pieces(stream: TextStream) -> Pieces:
        while (yield from stream.pieces_until((CALLS, CALL), ContentText)):
            yield from stream.take((CALLS, CALL))
            while (yield from _call(stream)):
                pass

    return pieces


def _call(stream: TextStream) -> CallPieces:
    """One call; returns whether another may follow."""
    yield from stream.skip_blanks()
    yield from stream.take((CALL,))
    if (yield from stream.take((CALLS_END,))):
        return False
    start = stream.position
    name = yield from stream.text_until((SEPARATOR,))
    if name is None:
        yield ContentText(stream.since(start))
        return False
    yield from stream.take((SEPARATOR,))
    if name.strip() == KIND:
        name = yield from stream.text_until(("\n", "{"))
    yield ToolCallName((name or "").strip())
    yield from _arguments(stream)
    return True


def _arguments(stream: TextStream) -> Pieces:
    yield from stream.skip_blanks()
    yield from stream.take((FENCE,))
    yield from stream.skip_blanks()
    yield from stream_arguments(stream)
    yield from stream.text_until((CALL_END, CALLS_END))
    yield from stream.take((CALL_END,))


def matches(template: str) -> bool:
    return CALLS in template


FORMAT = ToolFormat(
    "deepseek",
    matches,
    parse,
    CallLayout(
        lambda name: f"{CALL}{KIND}{SEPARATOR}{name}\n{FENCE}",
        f"{FENCE_END}{CALL_END}",
        begin=CALLS,
        end=CALLS_END,
    ),
    markers=(CALLS, CALLS_END, CALL, SEPARATOR, CALL_END),
    text_arguments=True,
    null_content=True,
    aliases=("deepseek_v3",),
)
