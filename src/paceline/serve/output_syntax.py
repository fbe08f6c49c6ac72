"""How the text of one output is written: which parts of it are reasoning, content and tool calls."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from paceline.serve.output_pieces import (
    ContentText,
    OutputParser,
    OutputPiece,
    Parse,
    PlainParser,
    ReasoningText,
    StreamParser,
    TrimmedParser,
)
from paceline.serve.reasoning import ReasoningCounter, ReasoningFormat

ID_CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
ID_LENGTH = 24


@dataclass(frozen=True, slots=True)
class OpenReasoning:
    """The reasoning of one output.

    is_open        the prompt has opened it
    decode         tokens to text with special tokens
    closing_token  its closing mark where that is a token of its own
    """

    reasoning_format: ReasoningFormat
    is_open: bool
    decode: Callable[[list[int]], str]
    closing_token: int | None = None

    def counter(self) -> ReasoningCounter:
        return ReasoningCounter(self.reasoning_format, self.is_open, self.decode, self.closing_token)


@dataclass(frozen=True, slots=True)
class OutputSyntax:
    """What a request asks of its outputs, and so how they are read.

    parse            finds the parts; None: all text is content
    shows_reasoning  whether the response carries the reasoning
    offers_tools     the output may be a tool call
    is_forced        the output is tool calls and nothing else
    is_parallel      it may hold several calls; else those after the first are left out
    id_length        characters of a tool call's id; None: as OpenAI's
    """

    parse: Parse | None = None
    reasoning: OpenReasoning | None = None
    shows_reasoning: bool = True
    offers_tools: bool = False
    is_forced: bool = False
    is_parallel: bool = True
    id_length: int | None = None

    def parser(self) -> OutputParser:
        """A parser for one output."""
        if self.parse is None:
            return PlainParser()
        hidden: list[type[OutputPiece]] = [] if self.shows_reasoning else [ReasoningText]
        if self.is_forced:  # what a limit has cut off is no content
            hidden.append(ContentText)
        return TrimmedParser(StreamParser(self.parse), tuple(hidden))

    def call_id(self) -> str:
        """The id of a new call."""
        characters = (secrets.choice(ID_CHARACTERS) for _ in range(self.id_length or ID_LENGTH))
        return ("" if self.id_length else "call_") + "".join(characters)


PLAIN = OutputSyntax()
