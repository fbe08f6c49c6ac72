"""Tokens and the characters they stand for.

The text of an output arrives later than its tokens while a stop string may begin, and a stop string cuts it inside a
token. A token is shown once all its characters are part of the text, so that tokens, offsets and text always agree,
and a stream carries the same entries as a whole response.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from paceline.core.types import Request, RequestOutput, TokenLogprob
from paceline.serve.token_text import TokenText


@dataclass(frozen=True, slots=True)
class ShownToken:
    """One token of a response.

    entry     its log-probability and alternatives; None: the first token of a prompt, which nothing predicts
    text      its characters, or how a token that is part of a character or special is spelled
    offset    where it starts in the text of the choice
    is_piece  its text is what stands there in the text of the choice, also where a stop string has cut it
    is_end    it ended the sequence, and is no part of the text
    """

    token: int
    entry: TokenLogprob | None
    text: str
    offset: int
    is_piece: bool = False
    is_end: bool = False


@dataclass(frozen=True, slots=True)
class _PlacedToken:
    """A token and its place among the characters of all tokens."""

    shown: ShownToken
    end: int


class TokenPlacer:
    """Gives tokens their places, one after the other. start: characters before the first one."""

    def __init__(self, token_text: TokenText, *, skip_special_tokens: bool, start: int = 0) -> None:
        self._token_text = token_text
        self._detokenizer = token_text.stream(skip_special_tokens=skip_special_tokens)
        self._inside_character = False
        self.length = start  # characters of all tokens so far

    def place(self, token: int, entry: TokenLogprob | None, *, last: bool = False) -> _PlacedToken:
        """The next token. last: what the tokenizer still holds back belongs to it."""
        piece = self._detokenizer.feed([token]) + (self._detokenizer.flush() if last else "")
        is_whole = bool(piece) and not self._inside_character
        self._inside_character = not piece and not self._token_text.is_special(token)
        text = piece if is_whole else self._token_text.spelling(token)
        start, self.length = self.length, self.length + len(piece)
        return _PlacedToken(ShownToken(token, entry, text, start, is_piece=is_whole), self.length)

    def final_token(self, token: int, entry: TokenLogprob | None) -> ShownToken:
        """The token that ended the sequence."""
        return ShownToken(token, entry, self._token_text.spelling(token), self.length, is_end=True)


class TokenAligner:
    """Shows the tokens of one output as its text arrives. echo: the length of the text before it."""

    def __init__(self, token_text: TokenText, request: Request, eos_token_ids: frozenset[int], echo: int = 0) -> None:
        self._placer = TokenPlacer(token_text, skip_special_tokens=request.skip_special_tokens, start=echo)
        self._ends = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else eos_token_ids)
        self._include_stop = request.include_stop
        self._waiting: deque[_PlacedToken] = deque()
        self._length = echo  # characters of the text so far

    def add(self, output: RequestOutput) -> list[ShownToken]:
        """The tokens whose characters are now part of the text; with the last output, all that remain of it."""
        self._length += len(output.text)
        entries = output.logprobs or ()
        end = self._final_token(output)
        for index, entry in enumerate(entries[:-1] if end else entries):
            last = output.finish_reason is not None and index == len(entries) - (2 if end else 1)
            self._waiting.append(self._placer.place(entry.token, entry, last=last))
        if output.finish_reason is None:
            return self._settled()
        return self._remaining() + ([self._placer.final_token(end.token, end)] if end else [])

    def _final_token(self, output: RequestOutput) -> TokenLogprob | None:
        ended_by_token = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
        if not ended_by_token or self._include_stop or not output.logprobs:
            return None
        last = output.logprobs[-1]
        return last if last.token in self._ends else None

    def _settled(self) -> list[ShownToken]:
        shown: list[ShownToken] = []
        while self._waiting and self._waiting[0].shown.offset < self._length >= self._waiting[0].end:
            shown.append(self._waiting.popleft().shown)
        return shown

    def _remaining(self) -> list[ShownToken]:
        """All tokens, or those before the place where a stop string has cut the text."""
        tokens = [*self._waiting]
        if self._placer.length <= self._length:
            return [token.shown for token in tokens]
        return [self._cut(token) for token in tokens if token.shown.offset < self._length]

    def _cut(self, token: _PlacedToken) -> ShownToken:
        shown = token.shown
        return replace(shown, text=shown.text[: self._length - shown.offset]) if shown.is_piece else shown


def prompt_tokens(
    token_text: TokenText, request: Request, entries: tuple[TokenLogprob, ...], echo: int
) -> list[ShownToken]:
    """The tokens of an echoed prompt. entries: of all but the first; echo: the length of the text that is shown.

    A prompt of token ids is shown with its special tokens, a string without those that the tokenizer has added.
    """
    placed = _placed_prompt(token_text, request, entries, skip_special_tokens=True)
    if placed[-1].end != echo:
        placed = _placed_prompt(token_text, request, entries, skip_special_tokens=False)
    return [replace(token.shown, offset=min(token.shown.offset, echo)) for token in placed]


def _placed_prompt(
    token_text: TokenText, request: Request, entries: tuple[TokenLogprob, ...], *, skip_special_tokens: bool
) -> list[_PlacedToken]:
    placer = TokenPlacer(token_text, skip_special_tokens=skip_special_tokens)
    last = len(request.prompt) - 1
    known: list[TokenLogprob | None] = [None, *entries]
    pairs = enumerate(zip(request.prompt, known))
    return [placer.place(token, entry, last=index == last) for index, (token, entry) in pairs]
