"""Pages and sequence caches: who may remember how much, and whose beginning is already there.

Every sequence is charged for all its tokens, also for those it shares: a runner may share or copy, and the books must hold
either way. A finished sequence stays as a resident, so that the next turn of its conversation, or another sequence with the
same beginning, need not be read again; residents go, oldest first, as soon as their blocks are needed.
"""

from __future__ import annotations

from paceline.core.protocols import Runner
from paceline.core.sequence import Sequence
from paceline.core.types import SequenceCache
from paceline.errors import OutOfMemory
from paceline.kv.block_manager import BlockManager
from paceline.kv.prefix_index import Match, PrefixIndex


class KVManager:
    """The cache of one runner, shared out among sequences."""

    def __init__(self, target: Runner, tokens: int, block: int, residents: int, spare: int = 0) -> None:
        """spare: tokens of the runner's room that are promised to nobody; probes of a tree ride along in them."""
        self._target = target
        room = target.free_tokens()
        # A block more would be a promise the runner cannot keep.
        self.pool = BlockManager(max(1, min(tokens, room - min(spare, room // 4)) // block), block)
        self._index = PrefixIndex(block)
        self._seq_caches: dict[int, SequenceCache] = {}  # of everyone in the index, running or resident
        self._residents: set[int] = set()
        self._most = residents
        self.cached_blocks = 0  # of residents: given back when asked for
        self.hits = 0  # sequences that found a beginning
        self.hit_tokens = 0  # tokens they did not have to read

    @property
    def capacity(self) -> int:
        """Tokens that fit if one sequence has everything to itself."""
        return self.pool.blocks * self.pool.size

    @property
    def keeps(self) -> bool:
        """Whether sequences that are over stay for a while."""
        return self._most > 0

    # --- sequences --------------------------------------------------------------------------------------------------------

    def admit(self, seq: Sequence) -> bool:
        """Open the sequence's sequence cache, with as much of its beginning as someone remembers. False: there is no room now."""
        found = self._useful(seq)
        if found is not None:
            self._index.touch(found.holder)  # so that making room takes others first
        if not self.reserve(seq, len(seq.ids)) or not self.fits(len(seq.ids)):
            self.pool.release(seq.seq_id)
            return False
        seq.seq_cache = self._begin(found)
        seq.num_cached_tokens = seq.seq_cache.length
        return True

    def known(self, seq: Sequence) -> int:
        """How many of the sequence's first tokens need not be read."""
        found = self._useful(seq)
        return found.length if found is not None else 0

    def reserve(self, seq: Sequence, tokens: int) -> bool:
        """Pages for the sequence's first `tokens` tokens; residents go if need be. False: not even then."""
        while True:
            try:
                self.pool.grow(seq.seq_id, tokens)
                return True
            except OutOfMemory:
                if not self._evict():
                    return False

    def fits(self, writes: int) -> bool:
        """Whether the runner itself can store this many more tokens; residents go if need be."""
        while self._target.free_tokens() < writes:
            if not self._evict():
                return False
        return True

    def publish(self, seq: Sequence) -> None:
        """The sequence's sequence cache now holds its prompt: others may begin from it."""
        if self._most and seq.seq_cache is not None:
            self._index.add(seq.seq_id, seq.ids[: seq.seq_cache.length])
            self._seq_caches[seq.seq_id] = seq.seq_cache

    def release(self, seq: Sequence, *, keep: bool) -> None:
        """The sequence is over, or must begin again. `keep`: it stays as a resident. Releasing twice is harmless."""
        seq_cache, seq.seq_cache = seq.seq_cache, None
        if seq_cache is None:
            return
        if keep and self._most and seq_cache.length >= self.pool.size:
            self._stay(seq, seq_cache)
            return
        self._forget(seq.seq_id)
        self._target.free(seq_cache)

    def drop_residents(self) -> None:
        """Give back all that no running sequence needs."""
        while self._evict():
            pass

    # --- residents ----------------------------------------------------------------------------------------------------

    def _stay(self, seq: Sequence, seq_cache: SequenceCache) -> None:
        self._index.add(seq.seq_id, seq.ids[: seq_cache.length])
        self._seq_caches[seq.seq_id] = seq_cache
        self._residents.add(seq.seq_id)
        self.pool.shrink(seq.seq_id, seq_cache.length)
        self.cached_blocks += len(self.pool.table(seq.seq_id))
        if len(self._residents) > self._most:
            self._evict()

    def _evict(self) -> bool:
        """Close the resident used longest ago; False if there is none."""
        oldest = self._index.oldest({*self._residents})
        if not isinstance(oldest, int):
            return False
        seq_cache = self._seq_caches[oldest]
        self._forget(oldest)
        self._target.free(seq_cache)
        return True

    def _forget(self, holder: int) -> None:
        self._index.remove(holder)
        self._seq_caches.pop(holder, None)
        if holder in self._residents:
            self._residents.remove(holder)
            self.cached_blocks -= len(self.pool.table(holder))
        self.pool.release(holder)

    # --- beginnings ---------------------------------------------------------------------------------------------------

    def _useful(self, seq: Sequence) -> Match | None:
        """Who remembers the sequence's beginning; its last token is always read anew, for it says what comes next."""
        found = self._index.longest(seq.ids[:-1]) if self._most else None
        return found if found is not None and found.length >= self.pool.size else None

    def _begin(self, found: Match | None) -> SequenceCache:
        """A sequence cache that holds what was found, if making room has left it in place."""
        if found is None or found.holder not in self._index:
            return self._target.new_cache()
        self.hits += 1
        self.hit_tokens += found.length
        assert isinstance(found.holder, int)
        seq_cache = self._seq_caches[found.holder]
        lost = self._index.length(found.holder) - found.length
        if found.holder not in self._residents or lost >= self.pool.size:
            return self._target.fork(seq_cache, found.length)
        # The next turn of a conversation: the resident ends here, and its sequence cache goes on.
        self._forget(found.holder)
        self._target.truncate(seq_cache, found.length)
        return seq_cache
