"""Pages of the cache: who holds which, how many are free.

A sequence's tokens lie in blocks of `size` tokens. A sequence gets neighbouring blocks as long as there are any: looking back
over neighbours copies nothing. Pages may be held by several sequences at once: a shared prompt is stored once. A block held
by more than one is never written; whoever must write into it first gets a copy (see `writable`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from paceline.errors import OutOfMemory

BLOCK_SIZE = 64  # tokens a block. Prompts are cut at multiples of it: a sequence then does not depend on its batch
KNOB = "give the cache more pages (--cache-tokens), run fewer texts at a time, or shorten them"


@dataclass(frozen=True, slots=True)
class Copy:
    """A block whose content must be copied before the holder may write."""

    source: int
    target: int


class BlockManager:
    """A fixed number of blocks and the lists of who holds them."""

    def __init__(self, blocks: int, size: int) -> None:
        self.blocks, self.size = blocks, size
        self.free = blocks
        self._holders = [0] * blocks
        self._tables: dict[Hashable, list[int]] = {}

    @property
    def used(self) -> int:
        return self.blocks - self.free

    def needed(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.size)

    def table(self, holder: Hashable) -> list[int]:
        """The holder's blocks in the order of its tokens. Not a copy: do not change it."""
        return self._tables.setdefault(holder, [])

    def grow(self, holder: Hashable, tokens: int) -> bool:
        """Make sure the holder has blocks for this many tokens; True if any were added.

        Raises OutOfMemory, and then nothing has changed.
        """
        table = self.table(holder)
        missing = self.needed(tokens) - len(table)
        if missing > self.free:
            raise OutOfMemory(f"the cache has {self.free} free pages of {self.size} and needs {missing}: {KNOB}")
        for _ in range(missing):
            table.append(self._take(table[-1] + 1 if table else None))
        return missing > 0

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
        """`target`, which holds nothing yet, also holds the source's blocks for its first `tokens` tokens."""
        blocks = self.table(source)[: self.needed(tokens)]
        for block in blocks:
            self._holders[block] += 1
        self._tables[target] = list(blocks)

    def writable(self, holder: Hashable, start: int, end: int) -> list[Copy]:
        """Make the holder the only one of the blocks of tokens start to end; returns what must be copied for that."""
        table, copies = self.table(holder), []
        for place in range(start // self.size, min(self.needed(end), len(table))):
            block = table[place]
            if self._holders[block] > 1:
                if not self.free:
                    raise OutOfMemory(f"the cache has no free page left: {KNOB}")
                fresh = self._take(table[place - 1] + 1 if place else None)
                self._drop(block)
                table[place] = fresh
                copies.append(Copy(block, fresh))
        return copies

    def _take(self, wanted: int | None) -> int:
        """The block wanted, if it is free, or one with much room behind it. There must be a free one."""
        block = wanted if wanted is not None and self._is_free(wanted) else self._roomy()
        self._holders[block] = 1
        self.free -= 1
        return block

    def _is_free(self, block: int) -> bool:
        return block < self.blocks and self._holders[block] == 0

    def _roomy(self) -> int:
        """The middle of the longest run of free blocks: whoever lies before it keeps room to grow, and so does the new
        one. At the very beginning of the pool nobody lies before it."""
        best, length, start = 0, 0, 0
        for block in range(self.blocks + 1):
            if block < self.blocks and self._holders[block] == 0:
                continue
            if block - start > length:
                best, length = start, block - start
            start = block + 1
        return best if best == 0 else best + length // 2

    def _drop(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block] == 0:
            self.free += 1
