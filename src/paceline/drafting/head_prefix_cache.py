"""What a head has read of earlier sequences, for sequences that begin the same way.

A target whose cache already holds a beginning does not read it again, and so hands out no states for it. A head that
knew nothing of it would lose up to half of its tokens a pass (docs/log.md): it goes on from what it wrote down when
that beginning was first read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.heads.attention import KeyValues
from paceline.kv.prefix_cache import common_prefix_length

MOST_TOKENS = 8192  # kept over all sequences: tens of megabytes


@dataclass(frozen=True, slots=True, eq=False)
class HeadPrefix:
    """One sequence, and the head's entries for it. Entry i was made of the state at a place of at most i + shift and of the
    token after that place, so it is good for any sequence with the same tokens up to that one."""

    ids: Sequence[int]
    shift: int
    keys: KeyValues  # each [kv heads, entries, head size]

    def good_for(self, ids: Sequence[int]) -> int:
        """How many of the entries another sequence may take over."""
        return max(0, min(self.keys.keys.shape[1], common_prefix_length(self.ids, ids) - 1 - self.shift))

    def clone(self) -> HeadPrefix:
        """The same, to outlive the buffers its entries lie in."""
        return HeadPrefix([*self.ids], self.shift, KeyValues(self.keys.keys.clone(), self.keys.values.clone()))

    def cut(self, entries: int) -> KeyValues:
        return KeyValues(self.keys.keys[:, :entries], self.keys.values[:, :entries])


class HeadPrefixCache:
    """Sequences that are over, as many as fit; the one used longest ago goes first."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most = most_tokens
        self._kept: list[HeadPrefix] = []

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, seq: HeadPrefix) -> None:
        """Keep a sequence. One that it goes on from is not needed beside it."""
        self._kept = [other for other in self._kept if not _goes_on(other, seq)] + [seq]
        while sum(len(other.ids) for other in self._kept) > self._most:
            self._kept.pop(0)

    def longest(self, ids: Sequence[int], running: Iterable[HeadPrefix] = ()) -> KeyValues | None:
        """The most entries that any of the sequences, these or `running` ones, has for a sequence with these tokens."""
        candidates = [*self._kept, *running]
        counts = [candidate.good_for(ids) for candidate in candidates]
        most = max(counts, default=0)
        if not most:
            return None
        found = candidates[counts.index(most)]
        if found in self._kept:  # used just now: the last to go
            self._kept.remove(found)
            self._kept.append(found)
        return found.cut(most)


def _goes_on(old: HeadPrefix, new: HeadPrefix) -> bool:
    return old.shift >= new.shift and common_prefix_length(old.ids, new.ids) == len(old.ids)
