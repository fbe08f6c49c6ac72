"""Blocks of layers with a sliding window: a pool of its own, in which a sequence keeps little more than its window.

Table and tokens are as in the pool of all other layers, but an entry may be `gone`: its block was taken back. Blocks
are taken back only when the pool is short, so that a prefix can be shared as long as there is room: first those that
have left the window of their holder, then whatever the holders that were used least recently have. What a holder then
lacks of a window it must read again; `lacks` says so.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from paceline.errors import OutOfMemory
from paceline.kv.block_manager import ADVICE, BLOCK_SIZE, BlockCopy, BlockManager, WindowLimit

PASS_TOKENS = 2048  # of prompts that one pass reads
SEQ_TOKENS = 4096  # of a sequence that the pool of all other layers is thought to hold
MIN_SEQS = 8


def window_pool_tokens(cache_tokens: int, window: int, block_size: int = BLOCK_SIZE) -> int:
    """Tokens of the pool beside a cache of so many: a window a sequence, what a step and its rollback touch around it,
    and a pass of prompts. Never more than the cache."""
    windows = window_limit(cache_tokens, window, block_size).total * block_size
    return min(cache_tokens, windows + PASS_TOKENS + block_size)


def window_limit(cache_tokens: int, window: int, block_size: int = BLOCK_SIZE) -> WindowLimit:
    """Blocks that a sequence keeps between passes, and all sequences together."""
    each = -(-window // block_size) + 3
    return WindowLimit(each, each * (MIN_SEQS + cache_tokens // SEQ_TOKENS))


class WindowBlocks(BlockManager):
    """A fixed number of blocks, and tables with gaps. window: the longest of the layers."""

    def __init__(self, num_blocks: int, window: int, block_size: int = BLOCK_SIZE) -> None:
        super().__init__(num_blocks, block_size)
        self.gone = num_blocks  # what stands in a table for a block that was taken back: the one behind the last
        self._window = window

    def lacks(self, holder: Hashable, length: int) -> bool:
        """Whether the token after the first `length` would see one that is gone."""
        first, end = max(0, length - self._window + 1) // self.block_size, self.needed(length)
        table = self.table(holder)
        return len(table) < end or self.gone in table[first:end]

    def reserve(self, holder: Hashable, end: int, used: Mapping[Hashable, int]) -> list[BlockCopy]:
        """Blocks of the holder's own for the tokens of a pass up to `end`; returns what must be copied for that.

        used: the holders of the pass, this one too, and where the row of each begins. Raises OutOfMemory.
        """
        table, start = self.touched(holder), used[holder]
        table += [self.gone] * (self.needed(end) - len(table))
        written = range(start // self.block_size, self.needed(end))
        places = [place for place in written if not self._is_own(table[place])]
        self._make_room(len(places), used)
        return [copy for place in places if (copy := self._replaced(table, place)) is not None]

    def share(self, source: Hashable, target: Hashable, tokens: int) -> None:
        blocks = self.touched(source)[: self.needed(tokens)]
        for block in blocks:
            if block != self.gone:
                self._holders[block] += 1
        self._tables[target] = list(blocks)

    @property
    def _kept(self) -> int:
        """Tokens before a pass that its sequence keeps: a window, and what a rollback may uncover."""
        return self._window + self.block_size

    def touched(self, holder: Hashable) -> list[int]:
        """The holder's table; it is the one used last from now on."""
        table = self._tables.pop(holder, [])
        self._tables[holder] = table
        return table

    def _is_own(self, block: int) -> bool:
        return block != self.gone and self._holders[block] == 1

    def _replaced(self, table: list[int], place: int) -> BlockCopy | None:
        """A block of its own at this place of a table; what it must be copied from."""
        old = table[place]
        table[place] = self._take(table[place - 1] + 1 if place else None)
        self._drop(old)
        return None if old == self.gone else BlockCopy(old, table[place])

    def _make_room(self, count: int, used: Mapping[Hashable, int]) -> None:
        """At least `count` free blocks. Raises OutOfMemory, and then nothing that a holder in use sees has changed."""
        for holder in list(self._tables) if count > self.free else ():
            length = used.get(holder, self.block_size * (len(self._tables[holder]) - 1))
            self._give_up(holder, (length - self._kept) // self.block_size, count)
        for holder in [holder for holder in self._tables if holder not in used] if count > self.free else ():
            self._give_up(holder, len(self._tables[holder]), count)
        if count > self.free:
            raise OutOfMemory(f"the cache has {self.free} free blocks for sliding windows and needs {count}: {ADVICE}")

    def _give_up(self, holder: Hashable, places: int, count: int) -> None:
        """The first blocks of a holder, as long as fewer than `count` are free."""
        table = self._tables[holder]
        for place in range(min(places, len(table))):
            if self.free >= count:
                return
            if table[place] != self.gone:
                self._drop(table[place])
                table[place] = self.gone

    def _drop(self, block: int) -> None:
        if block != self.gone:
            super()._drop(block)
