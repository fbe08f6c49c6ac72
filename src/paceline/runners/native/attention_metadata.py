"""How the rows of a plain pass lie: where each sequence's keys are in the cache, its positions, and who sees whom."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.draft_tree import ancestors, depths, path_to
from paceline.core.types import Row
from paceline.kv.block_manager import BlockManager
from paceline.runners.native.eager_ops import BatchedDecodeGroup, EagerBatch, EagerOps, TextPart
from paceline.runners.native.kv_cache import BLOCK_SIZE, NativeSequenceCache, own

MAX_BLOCKS = 16  # of a sequence that looks back together with others: beyond, copying its keys costs more than a call


def place_of(table: list[int], token: int) -> int:
    return table[token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE


@dataclass(frozen=True, slots=True, eq=False)
class _Laid:
    """One row of a pass: its first node in the packed rows, and how many of its nodes are in the cache already."""

    row: Row
    seq_cache: NativeSequenceCache
    start: int
    skip: int

    @property
    def count(self) -> int:
        return len(self.row.parents) - self.skip

    @property
    def end(self) -> int:
        return self.seq_cache.length + len(self.row.parents)

    @property
    def blocks(self) -> int:
        return -(-self.end // BLOCK_SIZE)


def _grouped(laid: list[_Laid]) -> tuple[list[list[_Laid]], list[_Laid]]:
    """Those that look back together, and those that do so by themselves."""
    alike: dict[int, list[_Laid]] = {}
    alone: list[_Laid] = []
    for one in laid:
        short = one.count == 1 and one.row.is_chain and one.blocks <= MAX_BLOCKS
        (alike.setdefault(one.blocks, []) if short else alone).append(one)
    groups = [group for group in alike.values() if len(group) > 1]
    return groups, alone + [one for group in alike.values() if len(group) == 1 for one in group]


class Layout:
    """Lays rows out for `EagerOps`. Knows blocks and positions; reads nothing and writes nothing."""

    def __init__(self, blocks: BlockManager, ops: EagerOps, rope_cache: Tensor, dtype: torch.dtype) -> None:
        self._blocks, self._ops, self._turns, self._dtype = blocks, ops, rope_cache, dtype
        self._device = rope_cache.device

    def batch(self, rows: list[Row], skips: list[int] | None = None, *, prompts: bool = False) -> EagerBatch:
        """skips: nodes at the start of each row that are in the cache already. prompts: only ends are asked for."""
        positions: list[Tensor] = []
        laid: list[_Laid] = []
        start = 0
        for row, skip in zip(rows, skips or [0] * len(rows)):
            laid.append(_Laid(row, own(row.seq_cache), start, skip))
            positions.append(torch.tensor(depths(row.parents))[skip:] + row.seq_cache.length)
            start += laid[-1].count
        groups, others = _grouped(laid)
        parts = [self._text_part(one, prompts) for one in others]
        together = [self._together(group) for group in groups]
        turn = self._turns[torch.cat(positions).to(self._device)].to(self._dtype)[:, None]
        cosines, sines = turn[:, :, 0], turn[:, :, 1]
        return EagerBatch(torch.cat([cosines, cosines], dim=-1), torch.cat([-sines, sines], dim=-1), parts, together)

    def _text_part(self, laid: _Laid, prompts: bool) -> TextPart:
        """What attention needs to know of one row. Where bits matter, keys come in whole blocks with a mask."""
        row, seq_cache, count, end = laid.row, laid.seq_cache, laid.count, laid.end
        exact, chain, length = self._ops.node_by_node, row.is_chain, end - count
        keys = laid.blocks * BLOCK_SIZE if exact else end
        places, fresh = self.places(seq_cache, 0, keys), self.places(seq_cache, length, end)
        aside = mask = None
        if exact and not chain:
            aside, mask = self._asides(row, seq_cache, keys)
        elif exact or (count > 1 and not (chain and length == 0)):
            mask = self._mask(row, seq_cache.length, keys)[laid.skip :]
        tiled = exact and prompts and chain and count > 1
        views = self._ops.views(places, fresh)
        return TextPart(laid.start, count, length, places, fresh, mask, chain, aside, views, tiled)

    def _together(self, group: list[_Laid]) -> BatchedDecodeGroup:
        tables = [self._blocks.table(one.seq_cache) for one in group]
        fresh = [place_of(table, one.end - 1) for one, table in zip(group, tables)]
        blocks = [block for one, table in zip(group, tables) for block in table[: one.blocks]]
        ends = torch.tensor([one.end for one in group])[:, None]
        unseen = torch.arange(group[0].blocks * BLOCK_SIZE) >= ends
        mask = torch.zeros(unseen.shape, dtype=self._dtype).masked_fill_(unseen, -torch.inf)[:, None, None]
        rows = self._rows([one.start for one in group])
        device = self._device
        return BatchedDecodeGroup(rows, torch.tensor(fresh, device=device), torch.tensor(blocks, device=device), mask.to(device))

    def _rows(self, starts: list[int]) -> Tensor | slice:
        first, count = starts[0], len(starts)
        if starts == list(range(first, first + count)):
            return slice(first, first + count)
        return torch.tensor(starts, device=self._device)

    def places(self, seq_cache: NativeSequenceCache, start: int, end: int) -> Tensor | slice:
        """Tokens start to end of a sequence cache in the flat cache: a slice where its blocks are neighbours."""
        first, last = start // BLOCK_SIZE, -(-end // BLOCK_SIZE)
        table = self._blocks.table(seq_cache)[first:last]
        if table == list(range(table[0], table[0] + len(table))):
            offset = table[0] * BLOCK_SIZE - first * BLOCK_SIZE
            return slice(offset + start, offset + end)
        scattered = [table[token // BLOCK_SIZE - first] * BLOCK_SIZE + token % BLOCK_SIZE for token in range(start, end)]
        return torch.tensor(scattered, device=self._device)

    def _mask(self, row: Row, length: int, keys: int) -> Tensor:
        """Additive [nodes, keys]: all of the sequence, and of the row what stands before each node; nothing behind it."""
        count = len(row.parents)
        mask = torch.zeros(count, keys, dtype=self._dtype)
        mask[:, length : length + count].masked_fill_(~ancestors(row.parents), -torch.inf)
        mask[:, length + count :] = -torch.inf
        return mask.to(self._device)

    def _asides(self, row: Row, seq_cache: NativeSequenceCache, keys: int) -> tuple[Tensor, Tensor]:
        """Of a tree: the keys of each node off its first branch, ancestors in order; and the mask of all nodes."""
        length, count = seq_cache.length, len(row.parents)
        straight = next(node for node, parent in enumerate(row.parents) if parent != node - 1)
        table = self._blocks.table(seq_cache)
        seq = [place_of(table, token) for token in range(length)]
        fresh = [place_of(table, length + node) for node in range(count)]
        places: list[list[int]] = []
        for node in range(straight, count):
            path = [fresh[step] for step in path_to(row.parents, node)]
            places.append(seq + path + [path[-1]] * (keys - length - len(path)))
        seen = torch.tensor(depths(row.parents))[:, None] + length
        hidden = torch.arange(keys)[None] > seen
        mask = torch.zeros(count, keys, dtype=self._dtype).masked_fill_(hidden, -torch.inf)
        return torch.tensor(places, device=self._device), mask.to(self._device)
