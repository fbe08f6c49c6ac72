"""Who has already read the beginning of this text?

An index over texts whose cache is still there: running ones and finished ones that stay until their pages are needed.
Tokens are compared a page at a time on the way down and one by one on the last page, so finding the longest shared
beginning costs one dictionary lookup a page, however many texts are remembered.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from paceline.kv.prefix_cache import common_prefix_length


@dataclass(frozen=True, slots=True)
class Match:
    """A holder whose first `length` tokens are those asked for."""

    holder: Hashable
    length: int


@dataclass(slots=True)
class _Node:
    """One full page of tokens after the pages above it."""

    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    holders: dict[Hashable, None] = field(default_factory=dict)  # a set that remembers order: latest last


class PrefixIndex:
    """Tokens by holder, and the longest beginning a new text shares with any of them."""

    def __init__(self, page: int) -> None:
        self.page = page
        self._top = _Node()
        self._tokens: dict[Hashable, list[int]] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, holder: Hashable) -> bool:
        return holder in self._tokens

    def length(self, holder: Hashable) -> int:
        """Tokens remembered of a holder."""
        return len(self._tokens[holder])

    def add(self, holder: Hashable, tokens: Sequence[int]) -> None:
        """Remember a holder's tokens, in place of any it had before. It is now the most recently used."""
        self.remove(holder)
        self._tokens[holder] = list(tokens)
        node = self._top
        node.holders[holder] = None
        for start in range(0, len(tokens) - self.page + 1, self.page):
            node = node.children.setdefault(tuple(tokens[start : start + self.page]), _Node())
            node.holders[holder] = None

    def remove(self, holder: Hashable) -> None:
        """Forget a holder. Forgetting one that is not there is harmless."""
        tokens = self._tokens.pop(holder, None)
        if tokens is None:
            return
        node = self._top
        del node.holders[holder]
        for start in range(0, len(tokens) - self.page + 1, self.page):
            key = tuple(tokens[start : start + self.page])
            below = node.children[key]
            del below.holders[holder]
            if not below.holders:
                del node.children[key]
                return
            node = below

    def touch(self, holder: Hashable) -> None:
        """The holder was useful just now: it is the last to be given up."""
        self._tokens[holder] = self._tokens.pop(holder)

    def oldest(self, among: set[Hashable] | None = None) -> Hashable | None:
        """The holder whose use lies furthest back, of these or of all."""
        return next((holder for holder in self._tokens if among is None or holder in among), None)

    def longest(self, tokens: Sequence[int]) -> Match | None:
        """The holder that shares the longest beginning; None if no one shares a full page."""
        node, depth = self._top, 0
        while below := node.children.get(tuple(tokens[depth : depth + self.page])):
            node, depth = below, depth + self.page
        if not depth:
            return None
        page = slice(depth, depth + self.page)
        further = {holder: common_prefix_length(self._tokens[holder][page], tokens[page]) for holder in node.holders}
        best = max(reversed(further), key=further.__getitem__)
        return Match(best, depth + further[best])
