"""Prompt lookup: what followed the last few tokens when they stood in this sequence before?

The longest match goes first, and among matches of one length the most recent. With `branches` above 1 several
candidates are put to the target as one tree; what they share at the beginning is checked once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Drafter
from paceline.core.sequence import Sequence
from paceline.core.types import Capability, RowOutput, StepResult
from paceline.errors import OptionError

REMEMBERED = 8  # ends of each n-gram kept; older ones fade


@dataclass(slots=True)
class _Index:
    """Where each n-gram of a sequence has ended, latest last. Grows with the sequence: every token is indexed once."""

    indexed: int = 0
    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)


class Ngram(Drafter):
    """DraftOutput by looking the sequence's last tokens up in the sequence itself."""

    needs: frozenset[Capability] = frozenset()

    def __init__(self, longest: int = 4, shortest: int = 2, branches: int = 1) -> None:
        if not 1 <= shortest <= longest or branches < 1:
            raise OptionError("ngram needs 1 <= shortest <= longest and at least one branch")
        self.longest, self.shortest, self.branches = longest, shortest, branches
        self._indexes: dict[int, _Index] = {}

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        self._indexes[seq.seq_id] = _Index()

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        return [self._guess(seq, budget) if budget else draft_tree.empty() for seq, budget in zip(seqs, num_draft_tokens)]

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        pass

    def end(self, seq: Sequence) -> None:
        self._indexes.pop(seq.seq_id, None)

    def _guess(self, seq: Sequence, budget: int) -> DraftTree:
        index = self._indexes.setdefault(seq.seq_id, _Index())
        self._catch_up(index, seq.ids)
        share = budget if self.branches == 1 else max(1, -(-budget * 2 // (self.branches + 1)))
        paths: list[list[int]] = []
        for start in self._matches(index, seq.ids):
            path = seq.ids[start : start + share]
            if path not in paths:
                paths.append(path)
            if len(paths) == self.branches:
                break
        return draft_tree.merge(paths, budget)

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
