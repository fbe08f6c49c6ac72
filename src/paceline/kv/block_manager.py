"""Blocks of a KV cache: which holder has which, and how many are free.

The tokens of a sequence lie in blocks of `block_size` tokens, listed in its block table. A sequence gets neighbouring
blocks as long as there are any: attention over neighbours copies nothing. Several holders may share a block: a common
prompt is stored once. A shared block is never written; a holder that must write into it first gets a copy (`writable`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from paceline.core.types import Row
from paceline.errors import OutOfMemory

BLOCK_SIZE = 64  # tokens. Prompts are cut at multiples of it: what a sequence computes does not depend on its batch
UNBOUNDED = 1 << 24  # blocks of a pool that only counts, for runners whose buffers grow as they like
ADVICE = "give the cache more blocks (--kv-cache-tokens), run fewer sequences at a time, or shorten them"


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A block whose content must be copied before its holder may write."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class WindowLimit:
    """A smaller pool beside another, for layers with a window: a holder has as many blocks in it, at most `each`."""

    each: int
    total: int


class BlockManager:
    """A fixed number of blocks and the block tables of their holders.

    window_limit  of a pool for windows beside this one: holders whose windows would not fit there get no blocks here
    """

    def __init__(self, num_blocks: int = UNBOUNDED, block_size: int = BLOCK_SIZE) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free = num_blocks
        self.window_limit: WindowLimit | None = None
        self._holders: dict[int, int] = {}  # of each block that is used: by how many
        self._tables: dict[Hashable, list[int]] = {}

    @property
    def used(self) -> int:
        return self.num_blocks - self.free

    def needed(self, tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    def table(self, holder: Hashable) -> list[int]:
        """The holder's blocks in the order of its tokens. Not a copy: do not change it."""
        return self._tables.setdefault(holder, [])

    def num_held(self, holders: Iterable[Hashable]) -> int:
        """Blocks that these holders have together; one that several of them share counts once."""
        return len({block for holder in holders for block in self._tables.get(holder, ())})

    def grow(self, holder: Hashable, tokens: int) -> bool:
        """Make sure the holder has blocks for this many tokens; True if any were added.

        Raises OutOfMemory, and then nothing has changed.
        """
        table = self.table(holder)
        missing = self.needed(tokens) - len(table)
        if missing > self.free:
            raise OutOfMemory(
                f"the cache has {self.free} free blocks of {self.block_size} tokens and needs {missing}: {ADVICE}"
            )
        if missing > 0 and self.window_limit is not None:
            self._check_windows(self.window_limit, len(table), missing)
        for _ in range(missing):
            table.append(self._take(table[-1] + 1 if table else None))
        return missing > 0

    def _check_windows(self, window_limit: WindowLimit, held: int, missing: int) -> None:
        """Raises OutOfMemory where a holder of `held` blocks cannot have more beside the windows of all others."""
        windows = sum(min(len(table), window_limit.each) for table in self._tables.values())
        if windows - min(held, window_limit.each) + min(held + missing, window_limit.each) > window_limit.total:
            raise OutOfMemory(f"the cache has no room for a further sliding window: {ADVICE}")

    def grow_rows(self, rows: list[Row]) -> None:
        """Blocks for what every row of a pass reads, or OutOfMemory and nothing has changed."""
        try:
            for row in rows:
                self.grow(row.seq_cache, row.seq_cache.length + len(row.parents))
        except OutOfMemory:
            for row in rows:
                self.shrink(row.seq_cache, row.seq_cache.length)
            raise

    def shrink(self, holder: Hashable, tokens: int) -> None:
        """Give back blocks past this many tokens."""
        table = self.table(holder)
        keep = self.needed(tokens)
        for block in reversed(table[keep:]):
            self._drop(block)
        del table[keep:]

    def release(self, holder: Hashable) -> None:
        """Give all blocks of a holder back. Releasing twice is harmless."""
        for block in reversed(self._tables.pop(holder, [])):
            self._drop(block)

    def share(self, source: Hashable, target: Hashable, tokens: int) -> None:
        """`target`, which holds nothing yet, also holds the source's blocks for its first `tokens` tokens.

        Raises OutOfMemory where there is no room for its window.
        """
        blocks = self.table(source)[: self.needed(tokens)]
        if self.window_limit is not None:
            self._check_windows(self.window_limit, 0, len(blocks))
        for block in blocks:
            self._holders[block] += 1
        self._tables[target] = list(blocks)

    def writable(self, holder: Hashable, start: int, end: int) -> list[BlockCopy]:
        """Make the holder the only one of the blocks of tokens start to end; returns what must be copied for that."""
        table, copies = self.table(holder), []
        for place in range(start // self.block_size, min(self.needed(end), len(table))):
            block = table[place]
            if self._holders[block] > 1:
                if not self.free:
                    raise OutOfMemory(f"the cache has no free block: {ADVICE}")
                copy = self._take(table[place - 1] + 1 if place else None)
                self._drop(block)
                table[place] = copy
                copies.append(BlockCopy(block, copy))
        return copies

    def _take(self, preferred: int | None) -> int:
        """The preferred block, if it is free, or one with free blocks behind it. There must be a free one."""
        block = preferred if preferred is not None and self._is_free(preferred) else self._start_of_run()
        self._holders[block] = 1
        self.free -= 1
        return block

    def _is_free(self, block: int) -> bool:
        return block < self.num_blocks and block not in self._holders

    def _start_of_run(self) -> int:
        """The middle of the longest run of free blocks: the holder before it keeps room to grow, and so does the new
        one. At the very beginning of the pool no holder lies before it."""
        best, length, start = 0, 0, 0
        for block in [*sorted(self._holders), self.num_blocks]:
            if block - start > length:
                best, length = start, block - start
            start = block + 1
        return best if best == 0 else best + length // 2

    def _drop(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block] == 0:
            del self._holders[block]
            self.free += 1
