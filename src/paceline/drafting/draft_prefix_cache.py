"""Slots of a draft's sequences that are over, for sequences that go on from them.

A draft with a cache of its own reads a sequence when it is first asked to draft token. In the next turn of a conversation, and
under a prompt that many sequences share, most of it was read before.
"""

from __future__ import annotations

from paceline.core.protocols import Runner
from paceline.core.types import SequenceCache
from paceline.kv.block_manager import BLOCK_SIZE as TILE
from paceline.kv.prefix_index import PrefixIndex

MOST = 16  # sequences kept


class DraftPrefixCache:
    """Slots of one runner, found by what they hold. They go, oldest first, as soon as their room is needed."""

    def __init__(self, runner: Runner, most: int = MOST) -> None:
        self._runner, self._most = runner, most
        self._index = PrefixIndex(TILE)  # held by sequence caches; less than a tile in common is not worth looking after

    def __len__(self) -> int:
        return len(self._index)

    def keep(self, ids: list[int], seq_cache: SequenceCache) -> None:
        """A sequence is over whose sequence cache holds `ids`, or a beginning of them."""
        if seq_cache.length < TILE:
            self._runner.free(seq_cache)
            return
        self._index.add(seq_cache, ids[: seq_cache.length])
        if len(self._index) > self._most:
            self._close_oldest()

    def open(self, ids: list[int]) -> SequenceCache:
        """A sequence cache for a sequence with these tokens, which already holds as much of them as any sequence left behind.

        Its last token is never among them: a draft reads it to say what comes next.
        """
        found = self._index.longest(ids[:-1])
        if found is None:
            return self._runner.new_cache()
        seq_cache = found.holder
        assert isinstance(seq_cache, SequenceCache)
        if self._index.length(seq_cache) - found.length >= TILE:  # another sequence: that one may still be gone on from
            self._index.touch(seq_cache)
            return self._runner.fork(seq_cache, found.length)
        self._index.remove(seq_cache)
        self._runner.truncate(seq_cache, found.length)
        return seq_cache

    def make_room(self, tokens: int) -> None:
        """Give up as many as it takes for the runner to store this many tokens."""
        while self._index and self._runner.free_tokens() < tokens:
            self._close_oldest()

    def _close_oldest(self) -> None:
        seq_cache = self._index.oldest()
        assert isinstance(seq_cache, SequenceCache)
        self._index.remove(seq_cache)
        self._runner.free(seq_cache)
