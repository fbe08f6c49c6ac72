"""Log-probabilities as OpenAI's API and vLLM's show them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.core.types import TokenLogprob
from paceline.serve.shown_tokens import ShownToken
from paceline.serve.token_text import TokenText

Json = dict[str, Any]
MIN_LOGPROB = -9999.0  # JSON has no minus infinity


class TokenFormatter:
    """Tokens as the API shows them."""

    def __init__(self, token_text: TokenText, eos_token_ids: frozenset[int]) -> None:
        self.token_text, self.eos_token_ids = token_text, eos_token_ids

    def prompt_text(self, token_ids: list[int]) -> str:
        return self.token_text.decode(token_ids)

    def chat(self, tokens: list[ShownToken], *, as_ids: bool = False, most: int | None = None) -> Json:
        """The logprobs of a chat completion's choice. The token that ends it is no part of a message.

        most: alternatives of a token, itself included; None: all there are.
        """
        entries = [self._chat_entry(shown, as_ids, most) for shown in tokens if not shown.is_end]
        return {"content": entries, "refusal": None}

    def completion(self, tokens: list[ShownToken], *, as_ids: bool = False) -> Json:
        """The logprobs of a completion's choice. as_ids: tokens are spelled token_id:5."""
        return {
            "tokens": [id_spelling(shown.token) if as_ids else shown.text for shown in tokens],
            "token_logprobs": [shown.entry and finite(shown.entry.logprob) for shown in tokens],
            "top_logprobs": [shown.entry and self._alternatives(shown, shown.entry, as_ids) for shown in tokens],
            "text_offset": [shown.offset for shown in tokens],
        }

    def prompt(self, entries: tuple[TokenLogprob, ...], top: int) -> list[Json | None]:
        """vLLM's prompt_logprobs: a dictionary by token id for every prompt token but the first."""
        return [None, *(self._prompt_entry(entry, top) for entry in entries)]

    def _alternatives(self, shown: ShownToken, entry: TokenLogprob, as_ids: bool) -> Json:
        """Log-probabilities by spelling, the token itself first, as vLLM has them.

        Tokens that are spelled alike are told apart by their ids.
        """
        by_spelling = {id_spelling(shown.token) if as_ids else shown.text: finite(entry.logprob)}
        for token, logprob in entry.top:
            if token != shown.token:
                spelling = self._spelling(token, as_ids)
                by_spelling[id_spelling(token) if spelling in by_spelling else spelling] = finite(logprob)
        return by_spelling

    def _spelling(self, token: int, as_ids: bool) -> str:
        return id_spelling(token) if as_ids else self.token_text.spelling(token)

    def _chat_entry(self, shown: ShownToken, as_ids: bool, most: int | None) -> Json:
        entry = shown.entry
        assert entry is not None, "a chat has no echo"
        pairs = with_own(entry, most) if entry.top else ()
        own_bytes = list(shown.text.encode("utf-8", "replace")) if shown.is_piece else None
        return {
            **self._token(entry.token, entry.logprob, as_ids, shown.text, own_bytes),
            "top_logprobs": [self._token(token, logprob, as_ids) for token, logprob in pairs],
        }

    def _token(
        self, token: int, logprob: float, as_ids: bool, text: str | None = None, own_bytes: list[int] | None = None
    ) -> Json:
        spelling = self._spelling(token, as_ids) if as_ids or text is None else text
        token_bytes = self.token_text.token_bytes(token) if own_bytes is None else own_bytes
        return {"token": spelling, "logprob": finite(logprob), "bytes": token_bytes}

    def _prompt_entry(self, entry: TokenLogprob, top: int) -> Json:
        best = [(token, logprob, rank) for rank, (token, logprob) in enumerate(entry.top[:top], 1)]
        own = (entry.token, entry.logprob, entry.rank)
        return {
            str(token): {"logprob": finite(logprob), "rank": rank, "decoded_token": self.token_text.spelling(token)}
            for token, logprob, rank in [own, *(other for other in best if other[0] != entry.token)]
        }


def with_own(entry: TokenLogprob, most: int | None = None) -> Iterator[tuple[int, float]]:
    """The likeliest tokens, and the token itself also where it is not among them: then in the place of the last."""
    if any(token == entry.token for token, _ in entry.top):
        yield from entry.top
        return
    yield from entry.top if most is None else entry.top[: most - 1]
    yield entry.token, entry.logprob


def finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


def id_spelling(token: int) -> str:
    return f"token_id:{token}"
