"""Prompt lookup: what followed the last few tokens when they stood in this text before?

The longest match goes first, and among matches of one length the most recent. With `branches` above 1 several
candidates are put to the target as one tree; what they share at the beginning is checked once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.core import tree
from paceline.core.protocols import Ability, Output, Round
from paceline.core.sequence import Sequence
from paceline.core.tree import DraftTree
from paceline.errors import OptionError

REMEMBERED = 8  # ends of each n-gram kept; older ones fade


@dataclass(slots=True)
class _Index:
    """Where each n-gram of a text has ended, latest last. Grows with the text: every token is indexed once."""

    indexed: int = 0
    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)


class Ngram:
    """Guesses by looking the text's last tokens up in the text itself."""

    needs: frozenset[Ability] = frozenset()

    def __init__(self, longest: int = 4, shortest: int = 2, branches: int = 1) -> None:
        if not 1 <= shortest <= longest or branches < 1:
            raise OptionError("ngram needs 1 <= shortest <= longest and at least one branch")
        self.longest, self.shortest, self.branches = longest, shortest, branches
        self._indexes: dict[int, _Index] = {}

    def begin(self, text: Sequence, prompt: Output | None) -> None:
        self._indexes[text.number] = _Index()

    def propose(self, texts: list[Sequence], budgets: list[int]) -> list[DraftTree]:
        return [self._guess(text, budget) if budget else tree.empty() for text, budget in zip(texts, budgets)]

    def observe(self, texts: list[Sequence], rounds: list[Round]) -> None:
        pass

    def end(self, text: Sequence) -> None:
        self._indexes.pop(text.number, None)

    def _guess(self, text: Sequence, budget: int) -> DraftTree:
        index = self._indexes.setdefault(text.number, _Index())
        self._catch_up(index, text.ids)
        share = budget if self.branches == 1 else max(1, -(-budget * 2 // (self.branches + 1)))
        paths: list[list[int]] = []
        for start in self._matches(index, text.ids):
            path = text.ids[start : start + share]
            if path not in paths:
                paths.append(path)
            if len(paths) == self.branches:
                break
        return tree.merge(paths, budget)

    def _matches(self, index: _Index, ids: list[int]) -> Iterator[int]:
        """Places where what has just been said was said before: where its continuation starts."""
        seen: set[int] = set()
        for size in range(self.longest, self.shortest - 1, -1):
            for end in reversed(index.ends.get(tuple(ids[-size:]), ())):
                if end < len(ids) and end not in seen:
                    seen.add(end)
                    yield end

    def _catch_up(self, index: _Index, ids: list[int]) -> None:
        for end in range(index.indexed + 1, len(ids) + 1):
            for size in range(self.shortest, min(self.longest, end) + 1):
                ends = index.ends.setdefault(tuple(ids[end - size : end]), [])
                ends.append(end)
                del ends[:-REMEMBERED]
        index.indexed = len(ids)
