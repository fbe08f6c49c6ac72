"""What an EAGLE head has stored for a sequence, and its reuse for sequences with the same prefix.

A target whose cache already holds a prefix does not read it again and returns no states for it. A head without KV for
that prefix would lose up to half of its tokens per pass (docs/log.md): it continues from the KV it stored when the
prefix was first read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.sequence import Sequence
from paceline.heads.attention import KeyValues
from paceline.heads.kv_cache import KeyBuffers
from paceline.kv.prefix_cache import PrefixCache, PrefixEntry, PrefixMatch, common_prefix_length

MAX_CACHED_TOKENS = 8192  # of sequences that are over: tens of megabytes


@dataclass(slots=True, eq=False)
class HeadState:
    """What the head holds of one sequence. Its KV entries are made of the target's states, never of draft tokens."""

    seq: Sequence
    row: int  # of the buffers
    start: int  # the position of entry i is start + i: the target may have cached a prefix the head never read
    length: int = 0  # entries
    pending: list[Tensor] = field(default_factory=list)  # states not read yet, [positions, features]
    num_pending: int = 0  # positions in `pending`
    out: Tensor | None = None  # the head's output at the last position read, [hidden_size]

    @property
    def next_position(self) -> int:
        """Of the next entry."""
        return self.start + self.length

    def add(self, states: Tensor, count: int) -> None:
        """States of so many further positions."""
        self.pending.append(states)
        self.num_pending += count

    def all_pending(self) -> Tensor:
        return self.pending[0] if len(self.pending) == 1 else torch.cat(self.pending)

    def next_tokens(self, count: int) -> list[int]:
        """The token after each of the next `count` positions."""
        first = self.next_position + 1
        return self.seq.ids[first : first + count]

    def mark_read(self, count: int) -> None:
        """The first `count` of the pending states are entries now."""
        self.length += count
        self.num_pending -= count
        self.pending = [self.all_pending()[count:]] if self.num_pending else []

    def restart_at(self, position: int) -> None:
        """Drop everything: the next state is that of `position`."""
        self.start, self.length, self.out = position, 0, None
        self.pending.clear()
        self.num_pending = 0


@dataclass(frozen=True, slots=True, eq=False)
class HeadEntries:
    """KV entries of one sequence. Entry i depends on states up to position i + shift and on `ahead` tokens after it, so
    any sequence with the same tokens up to the last of them can use it."""

    shift: int
    kv: KeyValues  # each [num_kv_heads, entries, head_dim]
    ahead: int = 1

    def usable(self, num_shared_tokens: int) -> KeyValues:
        """The first entries, which another sequence can use that shares this many first tokens."""
        count = max(0, min(self.kv.keys.shape[1], num_shared_tokens - self.ahead - self.shift))
        return KeyValues(self.kv.keys[:, :count], self.kv.values[:, :count])

    def clone(self) -> HeadEntries:
        """The same in memory of its own: the row of the buffers is reused."""
        return HeadEntries(self.shift, KeyValues(self.kv.keys.clone(), self.kv.values.clone()), self.ahead)


class HeadPrefixes:
    """Reuses entries of sequences that are over, from the prefix cache, and of those that are running."""

    def __init__(self, buffers: KeyBuffers, prefix_cache: PrefixCache | None, owner: str, ahead: int = 1) -> None:
        """prefix_cache: None for a private one. owner: of the entries there. ahead: tokens an entry reads ahead."""
        self._buffers, self._owner, self._ahead = buffers, owner, ahead
        self._cache = PrefixCache() if prefix_cache is None else prefix_cache
        self._cache.limit(self._owner, MAX_CACHED_TOKENS)

    def reuse(self, state: HeadState, running: Iterable[HeadState]) -> None:
        """Start a sequence, whose prefix the target has read before, with the most entries any sequence has for it."""
        ids = state.seq.ids
        match = self._cache.longest(self._owner, ids)
        most = state.start + self._ahead  # the states from there on come with the sequence
        candidates = [] if match is None else [_usable(match, most)]
        for other in running:
            candidates.append(self._entries(other).usable(min(most, common_prefix_length(other.seq.ids, ids))))
        best = max(candidates, key=_count, default=None)  # of equals the first, which is the cached one
        if best is None or not _count(best):
            return
        if match is not None and best is candidates[0]:
            self._cache.use(match)
        self._take(state, best)

    def _take(self, state: HeadState, kv: KeyValues) -> None:
        self._buffers.write(state.row, kv)
        state.length = _count(kv)
        state.start -= state.length

    def keep(self, state: HeadState) -> None:
        """Keep the entries of a sequence that is over, in place of those of a sequence it continues."""
        tokens = list(state.seq.ids)
        if not state.length or len(tokens) < self._cache.block_size:
            return
        entries = self._entries(state).clone()
        match = self._cache.longest(self._owner, tokens)
        if match is not None and match.lost == 0 and match.entry.payload.shift >= entries.shift:
            self._cache.remove(match.entry)
        self._cache.add(PrefixEntry(self._owner, tokens, entries, _release_nothing))

    def _entries(self, state: HeadState) -> HeadEntries:
        return HeadEntries(state.start, self._buffers.written(state.row, state.length), self._ahead)


def _usable(match: PrefixMatch, most: int) -> KeyValues:
    entries: HeadEntries = match.entry.payload
    return entries.usable(min(most, match.length))


def _count(kv: KeyValues) -> int:
    return kv.keys.shape[1]


def _release_nothing() -> None:
    """The tensors of an entry are freed with it."""
