"""Reasoning before the answer: how model families mark it, and how it is told apart from the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import OptionError
from paceline.serve.output_pieces import ContentText, Parse, Pieces, ReasoningText
from paceline.serve.text_stream import TextStream


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around the reasoning of one family.

    begin, end  before and after it; a template may write `begin` into the prompt
    forced_end  what closes it where it has reached its longest allowed length; None: `end`
    is_tagged   the marks stand around the reasoning alone; otherwise the family's tool format reads the whole output
    aliases     what vLLM calls parsers of these marks: a command line written for it works here
    """

    name: str
    begin: str
    end: str
    forced_end: str | None = None
    is_tagged: bool = True
    aliases: tuple[str, ...] = ()

    def matches(self, chat_template: str) -> bool:
        return self.end in chat_template

    def parse(self, is_open: bool, answer: Parse, calls: tuple[str, ...] = ()) -> Parse:
        """Reasoning first, where there is any, then the answer.

        is_open  the prompt has opened it
        calls    marks of a tool call: models that forget to close their reasoning call all the same
        """

        def pieces(stream: TextStream) -> Pieces:
            start = stream.position
            if not is_open:
                yield from stream.skip_blanks()
            if (yield from stream.take((self.begin,))) or is_open:
                yield from stream.pieces_until((self.end, *calls), ReasoningText)
                yield from stream.take((self.end,))
            else:
                stream.position = start
            yield from answer(stream)

        return pieces


FORMATS = (
    ReasoningFormat(
        "think",
        "<think>",
        "</think>",
        aliases=("qwen3", "deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "minimax_m2", "nemotron_v3", "olmo3"),
    ),
    ReasoningFormat(
        "harmony",
        "<|channel|>analysis<|message|>",
        "<|end|>",
        "<|end|><|start|>assistant<|channel|>final<|message|>",
        is_tagged=False,
        aliases=("openai_gptoss",),
    ),
    ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
    ReasoningFormat("seed", "<seed:think>", "</seed:think>", aliases=("seed_oss",)),
    ReasoningFormat("kimi", "◁think▷", "◁/think▷"),
    ReasoningFormat("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
)


def reasoning_format(name: str) -> ReasoningFormat:
    """The format of this name or alias. Raises OptionError."""
    match = next((known for known in FORMATS if name in (known.name, *known.aliases)), None)
    if match is None:
        names = ", ".join(known.name for known in FORMATS)
        raise OptionError(f"--reasoning-parser is auto, none or one of {names}; not {name!r}")
    return match


def detect_reasoning(chat_template: str) -> ReasoningFormat | None:
    """The format of a chat template's family; None: it does not reason."""
    if "<|channel|>" in chat_template:
        return reasoning_format("harmony")
    tagged = [known for known in FORMATS if known.is_tagged and known.matches(chat_template)]
    return tagged[0] if tagged else None


def content_only(stream: TextStream) -> Pieces:
    """All text is content."""
    yield from stream.pieces_until((), ContentText)


class ReasoningCounter:
    """Counts the tokens of the reasoning, its marks not among them.

    closing_token  the closing mark where it is a token of its own: then no text has to be looked at
    """

    def __init__(
        self,
        reasoning: ReasoningFormat,
        is_open: bool,
        decode: Callable[[list[int]], str],
        closing_token: int | None = None,
    ) -> None:
        self._format, self._decode, self._closing_token = reasoning, decode, closing_token
        self._is_open, self._is_over = is_open, False
        self._tokens: list[int] = []  # since the output began, or since the reasoning did
        self.count = 0

    def add(self, token_ids: tuple[int, ...]) -> None:
        for token in token_ids:
            if self._is_over:
                return
            self._tokens.append(token)
            self._add_open() if self._is_open else self._look_for_begin()

    def _look_for_begin(self) -> None:
        text = self._decode(self._tokens).lstrip()
        if text.startswith(self._format.begin):
            self._is_open, self._tokens = True, []
        elif not self._format.begin.startswith(text):
            self._is_over = True

    def _add_open(self) -> None:
        if self._closing_token is not None:
            self._is_over = self._tokens.pop() == self._closing_token
            self.count += not self._is_over
            return
        tail = self._tokens[-(4 * len(self._format.end) + 8) :]
        self.count += 1
        if self._format.end in self._decode(tail):
            self._is_over = True
            self.count -= next(
                size for size in range(1, len(tail) + 1) if self._format.end in self._decode(tail[-size:])
            )
