"""The blocks of the target's KV cache, shared out among sequences, and what the prefix cache keeps of finished ones.

There is one pool of blocks. A sequence that shares a prefix with another shares its blocks, and they count once: a long
system prompt costs its memory once, however many sequences run under it. Entries of the prefix cache are evicted, least
recently used first, as soon as their blocks are needed.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.core.protocols import BlockPool, Runner
from paceline.core.sequence import Sequence
from paceline.core.types import SequenceCache
from paceline.errors import OutOfMemory
from paceline.kv.prefix_cache import TARGET, PrefixCache, PrefixEntry, PrefixMatch, target_owner


class KVManager:
    """Opens, grows, shares and frees the sequence caches of one runner."""

    def __init__(self, target: Runner, prefix_cache: PrefixCache, loras: Iterable[str] = ()) -> None:
        """loras: names of the target's adapters."""
        self._target, self._prefix_cache = target, prefix_cache
        self._owners = [target_owner(lora) for lora in (None, *loras)]
        self.blocks: BlockPool = target.blocks
        self._running: dict[int, SequenceCache] = {}  # by seq_id
        self._entries: dict[int, PrefixEntry] = {}  # of running sequences, by seq_id

    @property
    def capacity(self) -> int:
        """Tokens that fit if one sequence has everything to itself."""
        return self.blocks.num_blocks * self.blocks.block_size

    @property
    def keeps_finished(self) -> bool:
        """Whether finished sequences stay in the prefix cache."""
        return self._prefix_cache.enabled(TARGET)

    @property
    def used_blocks(self) -> int:
        """Blocks of running sequences; those that several share count once."""
        return self.blocks.num_held(list(self._running.values()))

    @property
    def cached_blocks(self) -> int:
        """Blocks that only finished sequences hold: eviction frees all of them."""
        return max(0, self.blocks.used - self.used_blocks)

    # --- running sequences --------------------------------------------------------------------------------------------

    def admit(self, seq: Sequence) -> bool:
        """Open the cache of a sequence, with as much of its prefix as is cached. False: there is no room now."""
        match = self._match(seq)
        if not self._has_room(len(seq.ids), match):
            return False
        try:
            seq_cache = self._open(match, seq.params.lora)
        except OutOfMemory:  # a runner that copies forks needs blocks of its own for them
            return self.evict() and self.admit(seq)
        if not self.reserve(seq_cache, len(seq.ids)):
            self._keep(seq.ids[: seq_cache.length], seq_cache)
            return False
        self._running[seq.seq_id] = seq_cache
        seq.start(seq_cache, self._kept_prompt(seq))
        return True

    def _kept_prompt(self, seq: Sequence) -> int:
        """Tokens of its prompt that later sequences can find: those of whole blocks."""
        size = self.blocks.block_size
        return seq.prompt_length // size * size if self.keeps_finished else 0

    def _has_room(self, tokens: int, match: PrefixMatch | None) -> bool:
        """Whether the free blocks and those of evictable entries are enough. A matched prefix is not evicted for it."""
        available = self.blocks.free + self.cached_blocks
        if match is None:
            return self._blocks_for(tokens) <= available
        shared = match.length // self.blocks.block_size
        exclusive = self.blocks.num_held([*self._running.values(), match.entry.payload]) - self.used_blocks
        return self._blocks_for(tokens) - shared <= available - min(shared, exclusive)

    def cached_prefix(self, seq: Sequence) -> int:
        """How many of the first tokens of a sequence are cached."""
        match = self._match(seq)
        return match.length if match is not None else 0

    def reserve(self, seq_cache: SequenceCache, tokens: int) -> bool:
        """Blocks for the first `tokens` tokens of a cache; the prefix cache makes room. False: not even then."""
        while True:
            try:
                self.blocks.grow(seq_cache, tokens)
                return True
            except OutOfMemory:
                if not self.evict():
                    return False

    def make_room(self, seqs: list[Sequence], num_tokens: int) -> None:
        """Blocks for so many more tokens of every one of these sequences, if finished ones can give up what lacks."""
        caches = [seq.seq_cache for seq in seqs if seq.seq_cache is not None]
        ends = [len(seq.ids) + num_tokens for seq in seqs]
        lacking = sum(
            max(0, self._blocks_for(end) - self.blocks.num_held([seq_cache])) for seq_cache, end in zip(caches, ends)
        )
        if self.blocks.free < lacking <= self.blocks.free + self.cached_blocks:
            for seq_cache, end in zip(caches, ends):
                self.reserve(seq_cache, end)

    def trim(self, seq: Sequence) -> None:
        """Give back blocks past the tokens of a running sequence."""
        if seq.seq_cache is not None:
            self.blocks.shrink(seq.seq_cache, seq.seq_cache.length)

    def evict(self) -> bool:
        """Give up the least recently used finished sequence; False if there is none."""
        return any(self._prefix_cache.evict(owner) for owner in self._owners)

    def publish(self, seq: Sequence) -> None:
        """The cache of a running sequence now holds its prompt: others may fork from it."""
        if self.keeps_finished and seq.seq_cache is not None:
            tokens = seq.ids[: seq.seq_cache.length]
            owner = target_owner(seq.params.lora)
            entry = PrefixEntry(owner, tokens, seq.seq_cache, release=_nothing, pinned=True)
            self._entries[seq.seq_id] = entry
            self._prefix_cache.add(entry)

    def release(self, seq: Sequence, *, keep: bool) -> None:
        """The sequence has ended, or must start again. keep: the prefix cache takes it. Harmless when called twice."""
        self._running.pop(seq.seq_id, None)
        entry = self._entries.pop(seq.seq_id, None)
        if entry is not None:
            self._prefix_cache.remove(entry)
        seq_cache = seq.release_cache()
        if seq_cache is None:
            return
        if keep:
            self._keep(seq.ids[: seq_cache.length], seq_cache)
        else:
            self._free(seq_cache)

    def clear(self) -> None:
        """Give back everything that no running sequence needs."""
        for owner in self._owners:
            self._prefix_cache.clear(owner)

    # --- prefixes -----------------------------------------------------------------------------------------------------

    def _match(self, seq: Sequence) -> PrefixMatch | None:
        """The cached prefix of a sequence. Its last token is always read again: it gives the next token.

        A sequence that reports the log-probabilities of its prompt reads all of it: the cache keeps no logits.
        """
        if not self.keeps_finished or seq.params.prompt_logprobs is not None:
            return None
        return self._prefix_cache.longest(target_owner(seq.params.lora), seq.ids[:-1])

    def _open(self, match: PrefixMatch | None, lora: str | None) -> SequenceCache:
        if match is None:
            new_cache = self._target.new_cache()
            new_cache.lora = lora
            return new_cache
        self._prefix_cache.use(match)
        seq_cache: SequenceCache = match.entry.payload
        if match.entry.pinned or match.lost >= self.blocks.block_size:
            return self._target.fork(seq_cache, match.length)
        # The next turn of a conversation: the finished sequence is not needed beside it, and its cache goes on.
        self._prefix_cache.remove(match.entry)
        self._target.truncate(seq_cache, match.length)
        self.blocks.shrink(seq_cache, match.length)
        return seq_cache

    def _keep(self, tokens: list[int], seq_cache: SequenceCache) -> None:
        if len(tokens) < self.blocks.block_size:
            self._free(seq_cache)
            return
        self.blocks.shrink(seq_cache, len(tokens))
        owner = target_owner(seq_cache.lora)
        self._prefix_cache.add(PrefixEntry(owner, tokens, seq_cache, release=lambda: self._free(seq_cache)))

    def _free(self, seq_cache: SequenceCache) -> None:
        self._target.free(seq_cache)
        self.blocks.release(seq_cache)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.blocks.block_size)


def _nothing() -> None:
    """A running sequence frees its own cache."""
