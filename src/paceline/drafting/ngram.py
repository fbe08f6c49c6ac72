"""Prompt lookup: proposes the tokens that followed the last few tokens earlier in the same sequence.

The longest match comes first, and among matches of one length the most recent. With `branches` above 1 several
candidates form one tree; their common prefix is verified once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Drafter
from paceline.core.sequence import Sequence
from paceline.core.types import RowOutput
from paceline.drafting.registry import DrafterContext, DrafterSpec, WeightsNeeded, options_of
from paceline.errors import OptionError

MAX_MATCH = 48  # tokens of a match that count for its confidence
MAX_ENDS = 8  # ends of each n-gram that are kept; older ones are dropped


@dataclass(slots=True)
class _NgramIndex:
    """Where each n-gram of a sequence has ended, latest last. Every token is indexed once."""

    num_indexed: int = 0
    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)


class Ngram(Drafter):
    """Looks up the last tokens of a sequence in the sequence itself.

    longest, shortest  tokens of an n-gram
    branches           candidates per step; above 1 they form a tree
    """

    looks_up = True

    def __init__(self, longest: int = 4, shortest: int = 2, branches: int = 1) -> None:
        if not 1 <= shortest <= longest or branches < 1:
            raise OptionError("ngram needs 1 <= shortest <= longest and at least one branch")
        self.longest, self.shortest, self.branches = longest, shortest, branches
        self._indexes: dict[int, _NgramIndex] = {}

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        self._indexes[seq.seq_id] = _NgramIndex()

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        return [self._draft(seq, k) if k else draft_tree.empty() for seq, k in zip(seqs, num_draft_tokens)]

    def end(self, seq: Sequence) -> None:
        self._indexes.pop(seq.seq_id, None)

    def _draft(self, seq: Sequence, num_draft_tokens: int) -> DraftTree:
        index = self._indexes.setdefault(seq.seq_id, _NgramIndex())
        self._catch_up(index, seq.ids)
        length = num_draft_tokens if self.branches == 1 else max(1, -(-num_draft_tokens * 2 // (self.branches + 1)))
        paths: list[list[int]] = []
        starts: list[int] = []
        for start in self._matches(index, seq.ids):
            path = seq.ids[start : start + length]
            if path not in paths:
                paths.append(path)
                starts.append(start)
            if len(paths) == self.branches:
                break
        if not paths:
            return draft_tree.empty()
        if self.branches > 1:
            return draft_tree.merge(paths, num_draft_tokens)
        return draft_tree.chain(paths[0], confidence=_confidence(seq.ids, starts[0], len(paths[0])))

    def _matches(self, index: _NgramIndex, ids: list[int]) -> Iterator[int]:
        """Where the continuation of each earlier occurrence of the last tokens starts."""
        seen: set[int] = set()
        for size in range(self.longest, self.shortest - 1, -1):
            for end in reversed(index.ends.get(tuple(ids[-size:]), ())):
                if end < len(ids) and end not in seen:
                    seen.add(end)
                    yield end

    def _catch_up(self, index: _NgramIndex, ids: list[int]) -> None:
        for end in range(index.num_indexed + 1, len(ids) + 1):
            for size in range(self.shortest, min(self.longest, end) + 1):
                ends = index.ends.setdefault(tuple(ids[end - size : end]), [])
                ends.append(end)
                del ends[:-MAX_ENDS]
        index.num_indexed = len(ids)


def _confidence(ids: list[int], start: int, count: int) -> list[float]:
    """Of the tokens from `start` on: the longer they and what is before them agree with the end, the surer."""
    matched = 0
    while matched < MAX_MATCH and matched < start and ids[start - 1 - matched] == ids[-1 - matched]:
        matched += 1
    return [1.0 - 1.0 / (1.0 + matched + depth) for depth in range(count)]


def build(context: DrafterContext) -> Ngram:
    return Ngram(**context.options)


SPEC = DrafterSpec(
    name="ngram",
    summary="prompt lookup: repeats what followed the same few tokens earlier in the sequence",
    weights=WeightsNeeded.NONE,
    build=build,
    options=options_of(Ngram),
    reference="Prompt Lookup Decoding, https://github.com/apoorvumang/prompt-lookup-decoding",
    takes_draft_model=False,
)
