"""Attention metadata of an eager pass: where each sequence's keys are, its positions, and which nodes see which."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.core.draft_tree import ancestors, depths, path_to
from paceline.core.types import Row
from paceline.layers.attention import AttentionSpans, BatchedDecodeGroup, EagerAttention, EagerBatch, SequenceSpan
from paceline.layers.rope import CosSin, cos_sin
from paceline.runners.native.kv_cache import KVCache, NativeSequenceCache, own

MAX_GROUP_BLOCKS = 16  # of a sequence that is batched with others: beyond, copying its keys costs more than a call
MAX_SPAN_NODES = 512  # of a prompt that sliding windows read: each such part reads a window more keys than it has nodes


@dataclass(frozen=True, slots=True, eq=False)
class PlacedRow:
    """Nodes of one row of a pass, by where they are in the packed rows.

    Nodes before `skip` are in the cache already, nodes from `stop` on are in another part of the row.
    """

    row: Row
    seq_cache: NativeSequenceCache
    start: int
    skip: int
    stop: int
    block_size: int

    @property
    def count(self) -> int:
        return self.stop - self.skip

    @property
    def length(self) -> int:
        """Tokens before the nodes."""
        return self.seq_cache.length + self.skip

    @property
    def end(self) -> int:
        return self.seq_cache.length + self.stop

    @property
    def blocks(self) -> int:
        return -(-self.end // self.block_size)

    def blocks_read(self, window: int | None) -> int:
        """Blocks that the last node may see keys of."""
        return self.blocks if window is None else min(self.blocks, -(-(window - 1) // self.block_size) + 1)

    def first_key(self, window: int | None) -> int:
        """The first token that a node sees."""
        return 0 if window is None else max(0, self.length - window + 1)

    def parts(self) -> list[PlacedRow]:
        """The nodes of a chain in parts of a bounded size."""
        starts = range(self.skip, self.stop, MAX_SPAN_NODES)
        return [
            replace(self, start=self.start + skip - self.skip, skip=skip, stop=min(skip + MAX_SPAN_NODES, self.stop))
            for skip in starts
        ]


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


def _split(placed: list[PlacedRow], window: int | None) -> _Split:
    """Split rows into batched single-token groups and the rest."""
    by_blocks: dict[int, list[PlacedRow]] = {}
    others: list[PlacedRow] = []
    for row in placed:
        blocks = row.blocks_read(window)
        short = row.count == 1 and row.row.is_chain and blocks <= MAX_GROUP_BLOCKS
        (by_blocks.setdefault(blocks, []) if short else others).append(row)
    groups = [group for group in by_blocks.values() if len(group) > 1]
    return _Split(groups, others + [row for group in by_blocks.values() if len(group) == 1 for row in group])


class BatchBuilder:
    """Builds the metadata that eager attention reads. Reads block tables; reads and writes no keys.

    windows  of the layers of the model; None among them: layers whose nodes see everything before them
    """

    def __init__(
        self,
        kv: KVCache,
        attention: EagerAttention,
        rope_caches: tuple[Tensor, ...],
        windows: Collection[int | None] = (None,),
    ) -> None:
        self._kv, self._attention, self._rope_caches, self._windows = kv, attention, rope_caches, windows
        self._dtype, self._device = kv.dtype, kv.device

    def batch(self, rows: list[Row], skips: list[int] | None = None, *, prefill: bool = False) -> EagerBatch:
        """skips: nodes at the start of each row that are cached already. prefill: only last nodes are asked for."""
        positions: list[Tensor] = []
        placed: list[PlacedRow] = []
        start = 0
        for row, skip in zip(rows, skips or [0] * len(rows)):
            placed.append(PlacedRow(row, own(row.seq_cache), start, skip, len(row.parents), self._kv.block_size))
            positions.append(torch.tensor(depths(row.parents))[skip:] + row.seq_cache.length)
            start += placed[-1].count
        rotations = self._rotations(torch.cat(positions).to(self._device))
        return EagerBatch(rotations, self._by_window(placed, prefill))

    def _rotations(self, positions: Tensor) -> tuple[CosSin, ...]:
        return tuple(cos_sin(cache, positions, self._dtype) for cache in self._rope_caches)

    def _by_window(self, placed: list[PlacedRow], prefill: bool) -> dict[int | None, AttentionSpans]:
        """What layers of each window read. A window that no sequence has filled yet hides nothing."""
        end = max(row.end for row in placed)
        views = [
            _GroupBuilder(self._kv, self._attention, window, slides=window is not None and end > window)
            for window in self._windows
        ]
        return {view.window: view.spans(placed, prefill) for view in views}


class _GroupBuilder:
    """Builds the metadata of the layers with one window, whose keys are in the cache of their group.

    window  of the layers; `sliding` is None as long as it hides nothing
    """

    def __init__(self, kv: KVCache, attention: EagerAttention, window: int | None, *, slides: bool) -> None:
        self._kv, self._attention, self._dtype, self._device = kv.group(window), attention, kv.dtype, kv.device
        self.window, self.sliding = window, window if slides else None

    def spans(self, placed: list[PlacedRow], prefill: bool) -> AttentionSpans:
        window = self.sliding
        split = _split(placed, self._read_window(window))
        spans = [self._span(part, window, prefill) for row in split.others for part in self._parts(row, window)]
        return AttentionSpans(spans, [self._group(group, window) for group in split.groups])

    def _read_window(self, window: int | None) -> int | None:
        """The window whose keys are read. Where last bits matter all keys are, and a mask hides those before it:
        sums then fall into the same lanes wherever the window begins."""
        return None if self._attention.node_by_node else window

    def _parts(self, placed: PlacedRow, window: int | None) -> list[PlacedRow]:
        """What one call attends to: all nodes, or where a window slides over them a bounded number at a time."""
        slides = window is not None and placed.end > window and placed.row.is_chain
        return placed.parts() if slides and not self._attention.node_by_node else [placed]

    def _span(self, placed: PlacedRow, window: int | None, prefill: bool) -> SequenceSpan:
        """Metadata of one row. Where last bits matter, keys come in whole blocks with a mask."""
        row, seq_cache, count, end = placed.row, placed.seq_cache, placed.count, placed.end
        exact, chain, length = self._attention.node_by_node, row.is_chain, placed.length
        first, last = placed.first_key(self._read_window(window)), placed.blocks * self._kv.block_size if exact else end
        all_slots, new_slots = self._kv.slots(seq_cache, first, last), self._kv.slots(seq_cache, length, end)
        branch_slots = mask = None
        if exact and not chain:
            branches = self._branches(placed, last, window)
            branch_slots, mask = branches.slots, branches.mask
        elif exact or (count > 1 and not _is_causal(placed, window)):
            mask = self._mask(placed, first, last, window)
        tiled = exact and prefill and chain and count > 1
        views = self._attention.views(all_slots, new_slots, self.window)
        return SequenceSpan(placed.start, count, length, all_slots, new_slots, mask, chain, branch_slots, views, tiled)

    def _group(self, group: list[PlacedRow], window: int | None) -> BatchedDecodeGroup:
        device, size, count = self._device, self._kv.block_size, group[0].blocks_read(self._read_window(window))
        new_slots = [self._kv.slot(row.seq_cache, row.end - 1) for row in group]
        blocks = [block for row in group for block in self._kv.table(row.seq_cache)[row.blocks - count : row.blocks]]
        ends = torch.tensor([row.end for row in group])[:, None]
        keys = torch.arange(count * size) + torch.tensor([(row.blocks - count) * size for row in group])[:, None]
        hidden = (keys >= ends) if window is None else (keys >= ends) | (keys < ends - window)
        rows = self._row_index([row.start for row in group])
        return BatchedDecodeGroup(
            rows,
            torch.tensor(new_slots, device=device),
            torch.tensor(blocks, device=device),
            self._additive(hidden)[:, None, None],
        )

    def _row_index(self, starts: list[int]) -> Tensor | slice:
        first, count = starts[0], len(starts)
        if starts == list(range(first, first + count)):
            return slice(first, first + count)
        return torch.tensor(starts, device=self._device)

    def _mask(self, placed: PlacedRow, first: int, last: int, window: int | None) -> Tensor:
        """Additive [nodes, keys]: of the keys from `first` up to `last`, what each node does not see."""
        keys = torch.arange(first, last)
        nodes = torch.arange(placed.length, placed.end)[:, None]
        if placed.row.is_chain:
            return self._additive(_outside(keys, nodes, window))
        length, depth = placed.seq_cache.length, torch.tensor(depths(placed.row.parents))
        keys[length - first : placed.end - first] = length + depth
        hidden = _outside(keys, length + depth[:, None], window)
        hidden[:, length - first : placed.end - first] |= ~ancestors(placed.row.parents)
        return self._additive(hidden)

    def _additive(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, -torch.inf).to(self._device)

    def _branches(self, placed: PlacedRow, keys: int, window: int | None) -> BranchMetadata:
        """The keys of each node of a tree off its first branch; and the mask of all nodes."""
        parents, length = placed.row.parents, placed.seq_cache.length
        straight = next(node for node, parent in enumerate(parents) if parent != node - 1)
        past = [self._kv.slot(placed.seq_cache, token) for token in range(length)]
        new = [self._kv.slot(placed.seq_cache, length + node) for node in range(len(parents))]
        slots: list[list[int]] = []
        for node in range(straight, len(parents)):
            path = [new[step] for step in path_to(parents, node)]
            slots.append(past + path + [path[-1]] * (keys - length - len(path)))
        nodes = torch.tensor(depths(parents))[:, None] + length
        mask = self._additive(_outside(torch.arange(keys), nodes, window))
        return BranchMetadata(torch.tensor(slots, device=self._device), mask)


def _outside(keys: Tensor, nodes: Tensor, window: int | None) -> Tensor:
    """Which keys are behind a node or before its window, by position: [nodes, keys]."""
    behind = keys[None] > nodes
    return behind if window is None else behind | (keys[None] <= nodes - window)


def _is_causal(placed: PlacedRow, window: int | None) -> bool:
    """Whether the nodes are a whole sequence from its first token on, and no window ends inside it."""
    return placed.row.is_chain and placed.length == 0 and (window is None or placed.end <= window)
