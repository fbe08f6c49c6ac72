"""The parts of an output: content, reasoning and tool calls. A parser finds them while the text arrives.

A parser gives the same content, reasoning and calls wherever the text is cut: it decides on characters it has seen,
never on where a chunk ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from paceline.serve.text_stream import TextStream


@dataclass(frozen=True, slots=True)
class ContentText:
    """Characters of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """Characters of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallName:
    """A tool call begins."""

    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """Characters of the arguments, JSON, of the call that began last."""

    text: str


OutputPiece = ContentText | ReasoningText | ToolCallName | ToolArguments
Pieces = Iterator[OutputPiece | None]  # None: more text is needed
Parse = Callable[[TextStream], Pieces]


class OutputParser(Protocol):
    """Finds the pieces of one output."""

    def feed(self, text: str) -> list[OutputPiece]:
        """The pieces that these characters complete."""

    def finish(self) -> list[OutputPiece]:
        """What was held back, once the output has ended."""


class PlainParser(OutputParser):
    """All text is content."""

    def feed(self, text: str) -> list[OutputPiece]:
        return [ContentText(text)] if text else []

    def finish(self) -> list[OutputPiece]:
        return []


class StreamParser(OutputParser):
    """Runs a parse function, which waits for more text where it yields None."""

    def __init__(self, parse: Parse) -> None:
        self._stream = TextStream()
        self._pieces = parse(self._stream)

    def feed(self, text: str) -> list[OutputPiece]:
        self._stream.add(text)
        return self._available()

    def finish(self) -> list[OutputPiece]:
        self._stream.end()
        return self._available()

    def _available(self) -> list[OutputPiece]:
        pieces: list[OutputPiece] = []
        for piece in self._pieces:
            if piece is None:
                break
            if isinstance(piece, ToolCallName) or piece.text:
                pieces.append(piece)
        return pieces


class TrimmedParser(OutputParser):
    """Drops the blanks that a model writes between reasoning, content and tool calls, and pieces of hidden kinds."""

    def __init__(self, parser: OutputParser, hidden: tuple[type[OutputPiece], ...] = ()) -> None:
        self._parser, self._hidden = parser, hidden
        self._kind: type[OutputPiece] | None = None
        self._blanks = ""  # blanks that belong to the text only if more of it follows
        self._at_start = False  # after reasoning or a call: leading blanks are dropped
        self._has_content = False  # content that goes on after a call keeps the blanks before it

    def feed(self, text: str) -> list[OutputPiece]:
        return self._trimmed(self._parser.feed(text))

    def finish(self) -> list[OutputPiece]:
        pieces = self._trimmed(self._parser.finish())
        if self._blanks and self._kind is ContentText and not self._at_start:
            pieces += self._shown([ContentText(self._blanks)])
        return pieces

    def _shown(self, pieces: list[OutputPiece]) -> list[OutputPiece]:
        return [piece for piece in pieces if not isinstance(piece, self._hidden)]

    def _trimmed(self, pieces: list[OutputPiece]) -> list[OutputPiece]:
        return self._shown([piece for raw in pieces for piece in self._trim(raw)])

    def _trim(self, piece: OutputPiece) -> list[OutputPiece]:
        if type(piece) is not self._kind:
            self._at_start = self._kind is not None or isinstance(piece, ReasoningText)
            self._kind, self._blanks = type(piece), ""
        if isinstance(piece, ToolCallName | ToolArguments):
            return [piece]
        text = self._blanks + piece.text
        if self._at_start and not (self._has_content and isinstance(piece, ContentText)):
            text = text.lstrip()
        kept = text.rstrip()
        self._blanks = text[len(kept) :]
        if not kept:
            return []
        self._at_start = False
        self._has_content |= isinstance(piece, ContentText)
        return [type(piece)(kept)]
