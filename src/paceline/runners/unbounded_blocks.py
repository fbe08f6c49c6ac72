"""Block accounting for runners whose memory is not divided into blocks: it counts, and never runs out."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import count

from paceline.kv.block_manager import BLOCK_SIZE, BlockManager, Copy

FREE_TOKENS = 1 << 30  # reported at any time: buffers grow until the machine has no more memory


class UnboundedBlocks(BlockManager):
    """Hands out as many blocks as are asked for. No block is shared: a fork copies."""

    def __init__(self, size: int = BLOCK_SIZE) -> None:
        super().__init__(0, size)
        self.free = FREE_TOKENS // size
        self._block_tables: dict[Hashable, list[int]] = {}
        self._next_block = count()

    @property
    def used(self) -> int:
        return sum(map(len, self._block_tables.values()))

    def table(self, holder: Hashable) -> list[int]:
        return self._block_tables.setdefault(holder, [])

    def grow(self, holder: Hashable, tokens: int) -> bool:
        table = self.table(holder)
        missing = self.needed(tokens) - len(table)
        table += [next(self._next_block) for _ in range(missing)]
        return missing > 0

    def shrink(self, holder: Hashable, tokens: int) -> None:
        del self.table(holder)[self.needed(tokens) :]

    def release(self, holder: Hashable) -> None:
        self._block_tables.pop(holder, None)

    def share(self, source: Hashable, target: Hashable, tokens: int) -> None:
        self.grow(target, tokens)

    def writable(self, holder: Hashable, start: int, end: int) -> list[Copy]:
        return []
