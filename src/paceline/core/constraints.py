"""Which tokens a request allows: lists of tokens, forbidden words, and several rules at once.

Each rule gives a mask for a path, so that every node of a draft tree has the mask of its own place and drafts stay
exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.sequence import Constraint


class AllowedTokens(Constraint):
    """No tokens but these."""

    def __init__(self, tokens: tuple[int, ...], vocab_size: int) -> None:
        self._mask = torch.zeros(vocab_size, dtype=torch.bool)
        self._mask[list(tokens)] = True

    def allowed(self, path: list[int]) -> Tensor:
        return self._mask

    def advance(self, tokens: list[int]) -> None:
        """Every place has the same mask."""


class BannedWords(Constraint):
    """The last token of a word may not follow the others. Words are token ids, at least one each."""

    def __init__(self, words: list[tuple[int, ...]], vocab_size: int) -> None:
        self._words = [word for word in words if len(word) > 1]
        self._mask = torch.ones(vocab_size, dtype=torch.bool)
        self._mask[[word[0] for word in words if len(word) == 1]] = False
        self._reach = max((len(word) - 1 for word in self._words), default=0)
        self._tail: list[int] = []  # the last generated tokens, as many as the longest word has before its last

    def allowed(self, path: list[int]) -> Tensor:
        before = tuple(self._tail + path)
        banned = [word[-1] for word in self._words if before[-len(word) + 1 :] == word[:-1]]
        if not banned:
            return self._mask
        mask = self._mask.clone()
        mask[banned] = False
        return mask

    def advance(self, tokens: list[int]) -> None:
        if self._reach:
            self._tail = (self._tail + tokens)[-self._reach :]


class AllConstraints(Constraint):
    """Several rules, the strongest first. A rule that would leave no token at all is passed over at that place."""

    def __init__(self, parts: list[Constraint]) -> None:
        self._parts = parts

    def allowed(self, path: list[int]) -> Tensor:
        mask = self._parts[0].allowed(path)
        for part in self._parts[1:]:
            narrower = mask & part.allowed(path)
            if narrower.any():
                mask = narrower
        return mask

    def advance(self, tokens: list[int]) -> None:
        for part in self._parts:
            part.advance(tokens)
