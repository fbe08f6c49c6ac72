"""Attention metadata of an eager pass: where each sequence's keys are, its positions, and which nodes see which."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.draft_tree import ancestors, depths, path_to
from paceline.core.types import Row
from paceline.layers.attention import BatchedDecodeGroup, EagerAttention, EagerBatch, SequenceSpan
from paceline.layers.rope import cos_sin
from paceline.runners.native.kv_cache import KVCache, NativeSequenceCache, own

MAX_GROUP_BLOCKS = 16  # of a sequence that is batched with others: beyond, copying its keys costs more than a call


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRow:
    """One row of a pass: its first node in the packed rows, and how many of its nodes are in the cache already."""

    row: Row
    seq_cache: NativeSequenceCache
    start: int
    skip: int
    block_size: int

    @property
    def count(self) -> int:
        return len(self.row.parents) - self.skip

    @property
    def end(self) -> int:
        return self.seq_cache.length + len(self.row.parents)

    @property
    def blocks(self) -> int:
        return -(-self.end // self.block_size)


@dataclass(frozen=True, slots=True, eq=False)
class BranchMetadata:
    """Nodes of a tree off its first branch."""

    slots: Tensor  # the keys of each, ancestors in order: [nodes, keys]
    mask: Tensor  # of all nodes of the tree, additive [nodes, keys]


@dataclass(frozen=True, slots=True, eq=False)
class _Split:
    """Rows of a pass by how they attend."""

    groups: list[list[PlacedRow]]  # batched single-token groups
    others: list[PlacedRow]


def _split(placed: list[PlacedRow]) -> _Split:
    """Split rows into batched single-token groups and the rest."""
    by_blocks: dict[int, list[PlacedRow]] = {}
    others: list[PlacedRow] = []
    for row in placed:
        short = row.count == 1 and row.row.is_chain and row.blocks <= MAX_GROUP_BLOCKS
        (by_blocks.setdefault(row.blocks, []) if short else others).append(row)
    groups = [group for group in by_blocks.values() if len(group) > 1]
    return _Split(groups, others + [row for group in by_blocks.values() if len(group) == 1 for row in group])


class BatchBuilder:
    """Builds the metadata that eager attention reads. Reads block tables; reads and writes no keys."""

    def __init__(self, kv: KVCache, attention: EagerAttention, rope_cache: Tensor) -> None:
        self._kv, self._attention, self._rope_cache = kv, attention, rope_cache
        self._dtype, self._device = kv.keys.dtype, rope_cache.device

    def batch(self, rows: list[Row], skips: list[int] | None = None, *, prefill: bool = False) -> EagerBatch:
        """skips: nodes at the start of each row that are cached already. prefill: only last nodes are asked for."""
        positions: list[Tensor] = []
        placed: list[PlacedRow] = []
        start = 0
        for row, skip in zip(rows, skips or [0] * len(rows)):
            placed.append(PlacedRow(row, own(row.seq_cache), start, skip, self._kv.block_size))
            positions.append(torch.tensor(depths(row.parents))[skip:] + row.seq_cache.length)
            start += placed[-1].count
        split = _split(placed)
        spans = [self._span(row, prefill) for row in split.others]
        groups = [self._group(group) for group in split.groups]
        rotation = cos_sin(self._rope_cache, torch.cat(positions).to(self._device), self._dtype)
        return EagerBatch(rotation, spans, groups)

    def _span(self, placed: PlacedRow, prefill: bool) -> SequenceSpan:
        """Metadata of one row. Where last bits matter, keys come in whole blocks with a mask."""
        row, seq_cache, count, end = placed.row, placed.seq_cache, placed.count, placed.end
        exact, chain, length = self._attention.node_by_node, row.is_chain, end - count
        keys = placed.blocks * self._kv.block_size if exact else end
        all_slots, new_slots = self._kv.slots(seq_cache, 0, keys), self._kv.slots(seq_cache, length, end)
        branch_slots = mask = None
        if exact and not chain:
            branches = self._branches(row, seq_cache, keys)
            branch_slots, mask = branches.slots, branches.mask
        elif exact or (count > 1 and not (chain and length == 0)):
            mask = self._mask(row, seq_cache.length, keys)[placed.skip :]
        tiled = exact and prefill and chain and count > 1
        views = self._attention.views(all_slots, new_slots)
        return SequenceSpan(placed.start, count, length, all_slots, new_slots, mask, chain, branch_slots, views, tiled)

    def _group(self, group: list[PlacedRow]) -> BatchedDecodeGroup:
        device, block_size = self._device, self._kv.block_size
        new_slots = [self._kv.slot(row.seq_cache, row.end - 1) for row in group]
        blocks = [block for row in group for block in self._kv.table(row.seq_cache)[: row.blocks]]
        ends = torch.tensor([row.end for row in group])[:, None]
        hidden = torch.arange(group[0].blocks * block_size) >= ends
        mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -torch.inf)[:, None, None]
        rows = self._row_index([row.start for row in group])
        return BatchedDecodeGroup(
            rows, torch.tensor(new_slots, device=device), torch.tensor(blocks, device=device), mask.to(device)
        )

    def _row_index(self, starts: list[int]) -> Tensor | slice:
        first, count = starts[0], len(starts)
        if starts == list(range(first, first + count)):
            return slice(first, first + count)
        return torch.tensor(starts, device=self._device)

    def _mask(self, row: Row, length: int, keys: int) -> Tensor:
        """Additive [nodes, keys]: all of the sequence, and of the row each node's ancestors; nothing behind it."""
        count = len(row.parents)
        mask = torch.zeros(count, keys, dtype=self._dtype)
        mask[:, length : length + count].masked_fill_(~ancestors(row.parents), -torch.inf)
        mask[:, length + count :] = -torch.inf
        return mask.to(self._device)

    def _branches(self, row: Row, seq_cache: NativeSequenceCache, keys: int) -> BranchMetadata:
        """The keys of each node of a tree off its first branch; and the mask of all nodes."""
        length, count = seq_cache.length, len(row.parents)
        straight = next(node for node, parent in enumerate(row.parents) if parent != node - 1)
        past = [self._kv.slot(seq_cache, token) for token in range(length)]
        new = [self._kv.slot(seq_cache, length + node) for node in range(count)]
        slots: list[list[int]] = []
        for node in range(straight, count):
            path = [new[step] for step in path_to(row.parents, node)]
            slots.append(past + path + [path[-1]] * (keys - length - len(path)))
        visible = torch.tensor(depths(row.parents))[:, None] + length
        hidden = torch.arange(keys)[None] > visible
        mask = torch.zeros(count, keys, dtype=self._dtype).masked_fill_(hidden, -torch.inf)
        return BranchMetadata(torch.tensor(slots, device=self._device), mask.to(self._device))
