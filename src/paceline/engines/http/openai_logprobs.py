"""Log-probabilities of OpenAI's two routes, with token ids instead of spellings."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from paceline.core.types import TokenLogprob
from paceline.hub.tokenizer import Tokenizer

TOKEN_ID = "token_id:"  # how vLLM spells a token when it is asked to
Pair = tuple[str, float]


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


def logprobs_of(document: Any, tokens: list[int], ids: TokenIds, number: int) -> tuple[TokenLogprob, ...]:
    """One entry a token, as far as the server has told them; alternatives that spell no single token are left out."""
    if not isinstance(document, dict):
        return ()
    entries = _chat(document["content"]) if isinstance(document.get("content"), list) else _completion(document)
    return tuple(_entry(token, own, top, ids, number) for token, (own, top) in zip(tokens, entries))


def _entry(token: int, own: float, top: list[Pair], ids: TokenIds, number: int) -> TokenLogprob:
    best = sorted(top, key=lambda pair: -pair[1])
    named = [(ids.of_spelling(spelling), logprob) for spelling, logprob in best]
    known = [(token_id, logprob) for token_id, logprob in named if token_id is not None]
    return TokenLogprob(token, own, tuple(known[:number]))


def _chat(content: list[Any]) -> list[tuple[float, list[Pair]]]:
    return [
        (float(entry["logprob"]), [(item["token"], float(item["logprob"])) for item in entry.get("top_logprobs") or ()])
        for entry in content
    ]


def _completion(document: dict[str, Any]) -> list[tuple[float, list[Pair]]]:
    own = document.get("token_logprobs") or []
    tops = document.get("top_logprobs") or [{}] * len(own)
    pairs = [[(name, float(value)) for name, value in (top or {}).items()] for top in tops]
    return [(float(logprob), top) for logprob, top in zip(own, pairs)]
