"""Sequence caches of a draft model, reused through the prefix cache.

A draft model reads a sequence when it first drafts for it. In the next turn of a conversation, and under a prompt that
many sequences share, it has read most of the sequence before.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial

from paceline.core.protocols import Runner
from paceline.core.types import SequenceCache
from paceline.errors import OutOfMemory
from paceline.kv.block_manager import BLOCK_SIZE
from paceline.kv.prefix_cache import PrefixCache, PrefixEntry

MAX_CACHED_TOKENS = 1 << 15  # of sequences that are over; a runner without a block pool has no other bound


class DraftKV:
    """Opens, keeps and evicts sequence caches of one runner under one owner of the prefix cache."""

    def __init__(self, runner: Runner, owner: str, prefix_cache: PrefixCache | None = None) -> None:
        """prefix_cache: None for a private one."""
        self.runner, self.owner = runner, owner
        self.prefix_cache = PrefixCache() if prefix_cache is None else prefix_cache
        self.prefix_cache.limit(owner, MAX_CACHED_TOKENS)

    def open(self, ids: list[int]) -> SequenceCache:
        """A sequence cache that holds as much of `ids` as any earlier sequence has left in the prefix cache.

        The last token is never included: the draft model reads it to predict the next one.
        """
        match = self.prefix_cache.longest(self.owner, ids[:-1])
        if match is None:
            return self.runner.new_cache()
        self.prefix_cache.use(match)
        seq_cache: SequenceCache = match.entry.payload
        if match.lost >= self.prefix_cache.block_size:  # another sequence may still continue from the rest
            with suppress(OutOfMemory):  # without room for a copy the rest is given up
                return self.runner.fork(seq_cache, match.length)
        self.prefix_cache.remove(match.entry)
        self.runner.truncate(seq_cache, match.length)
        return seq_cache

    def keep(self, ids: list[int], seq_cache: SequenceCache) -> None:
        """Keep the cache of a sequence that is over. It holds a prefix of `ids`; one below a block is freed."""
        if seq_cache.length < self.prefix_cache.block_size:
            self.runner.free(seq_cache)
            return
        release = partial(self.runner.free, seq_cache)
        self.prefix_cache.add(PrefixEntry(self.owner, ids[: seq_cache.length], seq_cache, release))

    def fitting(self, needs: list[int]) -> list[bool]:
        """Which steps, of so many tokens each, the runner has room for; kept caches are evicted for them.

        The first come first: a sequence that finds no room drafts nothing in this step.
        """
        self.make_room(sum(needs))
        free, fits = self.runner.free_tokens(), []
        for need in needs:
            fits.append(need <= free)
            free -= need if need <= free else 0
        return fits

    def make_room(self, num_tokens: int) -> None:
        """Evict kept caches until the runner can store this many tokens, or none is left."""
        while self.runner.free_tokens() < num_tokens and self.prefix_cache.evict(self.owner):
            pass


def step_tokens(num_unread: int, num_draft_tokens: int) -> int:
    """Tokens one step of one sequence may store, rounded up to blocks."""
    return num_unread + num_draft_tokens + BLOCK_SIZE
