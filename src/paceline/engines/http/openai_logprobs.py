"""Log-probabilities of OpenAI's two routes, with token ids instead of spellings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from paceline.core.types import TokenLogprob
from paceline.hub.tokenizer import Tokenizer

TOKEN_ID = "token_id:"  # how vLLM spells a token when it is asked to


class TokenIds:
    """Spellings -> token ids, by a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer.hf_tokenizer
        self._id = lru_cache(maxsize=4096)(self._single)

    def of_text(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer(text, add_special_tokens=False).input_ids] if text else []

    def of_spelling(self, spelling: str) -> int | None:
        """The token of a spelling; None where it spells no single token."""
        if spelling.startswith(TOKEN_ID):
            return int(spelling.removeprefix(TOKEN_ID))
        return self._id(spelling)

    def _single(self, spelling: str) -> int | None:
        ids = self.of_text(spelling)
        return ids[0] if len(ids) == 1 else None


@dataclass(frozen=True, slots=True)
class _Entry:
    """One token as a server reports it. top: spellings and log-probabilities."""

    spelling: str
    logprob: float
    top: list[tuple[str, float]]


def logprobs_of(document: Any, tokens: list[int], ids: TokenIds, number: int) -> tuple[TokenLogprob, ...]:
    """One log-probability a token, as far as the server has told them.

    tokens  of the same event, for servers that do not name the ids of entries; alternatives that spell no single token
            are left out
    """
    if not isinstance(document, dict):
        return ()
    entries = _chat(document["content"]) if isinstance(document.get("content"), list) else _completion(document)
    named = [ids.of_spelling(entry.spelling) if entry.spelling.startswith(TOKEN_ID) else None for entry in entries]
    known = [token if token is not None else other for token, other in zip(named, [*tokens, *[None] * len(named)])]
    return tuple(_logprob(token, entry, ids, number) for token, entry in zip(known, entries) if token is not None)


def _logprob(token: int, entry: _Entry, ids: TokenIds, number: int) -> TokenLogprob:
    best = sorted(entry.top, key=lambda pair: -pair[1])
    named = [(ids.of_spelling(spelling), logprob) for spelling, logprob in best]
    known = [(token_id, logprob) for token_id, logprob in named if token_id is not None]
    return TokenLogprob(token, entry.logprob, tuple(known[:number]))


def _chat(content: list[Any]) -> list[_Entry]:
    return [
        _Entry(
            str(entry["token"]),
            float(entry["logprob"]),
            [(item["token"], float(item["logprob"])) for item in entry.get("top_logprobs") or ()],
        )
        for entry in content
    ]


def _completion(document: dict[str, Any]) -> list[_Entry]:
    own = document.get("token_logprobs") or []
    tops = document.get("top_logprobs") or [{}] * len(own)
    pairs = [[(name, float(value)) for name, value in (top or {}).items()] for top in tops]
    rows = zip(document.get("tokens") or [""] * len(own), own, pairs)
    return [_Entry(str(name), float(logprob), top) for name, logprob, top in rows if logprob is not None]
