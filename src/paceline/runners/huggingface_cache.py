"""Keys and values of all sequences in one buffer a layer, as transformers' attention reads and writes them.

Buffers are [rows, heads, capacity, head_dim]; a sequence cache is a row. The model's own attention code sees a `Cache`
that writes each sequence's new entries behind its old ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from paceline.core.types import LayerKeys, SequenceCache

FIRST_CAPACITY = 256


class HuggingFaceSequenceCache(SequenceCache):
    """A row of the buffers."""

    __slots__ = ("last_row_start", "row")

    def __init__(self, row: int) -> None:
        super().__init__()
        self.row = row
        self.last_row_start = 0  # where the last row read begins


def own(seq_cache: SequenceCache) -> HuggingFaceSequenceCache:
    assert isinstance(seq_cache, HuggingFaceSequenceCache), "this sequence cache belongs to another runner"
    return seq_cache


class LayerBuffers(CacheLayerMixin):
    """Keys and values of one layer for every sequence; the plan of the pass says where its rows belong."""

    is_croppable = True

    def __init__(self, buffers: RowBuffers) -> None:
        super().__init__()
        self.buffers = buffers

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.keys = self._buffer(key_states)
        self.values = self._buffer(value_states)
        self.is_initialized = True

    def _buffer(self, like: Tensor) -> Tensor:
        return like.new_zeros(self.buffers.num_rows, like.shape[1], self.buffers.capacity, like.shape[3])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan = self.buffers.plan
        assert plan is not None and self.keys is not None and self.values is not None
        return plan.write(self.keys, key_states), plan.write(self.values, value_states)

    def grow(self, num_rows: int, capacity: int) -> None:
        """To at least this size: a layer that grew before another one failed may be larger."""
        if self.is_initialized:
            assert self.keys is not None and self.values is not None
            size = max(num_rows, self.keys.shape[0]), max(capacity, self.keys.shape[2])
            self.keys, self.values = _enlarged(self.keys, *size), _enlarged(self.values, *size)

    def move(self, row: int, source: Tensor, target: Tensor) -> None:
        if self.is_initialized:
            assert self.keys is not None and self.values is not None
            for buffer in (self.keys, self.values):
                buffer[row][:, target] = buffer[row][:, source]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self.buffers.plan.longest if self.buffers.plan else 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


def _enlarged(old: Tensor, num_rows: int, capacity: int) -> Tensor:
    new = old.new_zeros(num_rows, old.shape[1], capacity, old.shape[3])
    new[: old.shape[0], :, : old.shape[2]] = old
    return new


class PassPlan:
    """Where the rows of one pass are written and read."""

    def __init__(self, seq_caches: list[HuggingFaceSequenceCache], width: int, device: torch.device) -> None:
        self.starts = [seq_cache.length for seq_cache in seq_caches]
        self.longest = max(self.starts)
        self.end = self.longest + width
        rows = [seq_cache.row for seq_cache in seq_caches]
        # Neighbouring rows are read where they are; others have to be gathered.
        self._adjacent = rows == list(range(rows[0], rows[0] + len(rows)))
        self._first, self._count, self._width = rows[0], len(rows), width
        self._even = len(set(self.starts)) == 1
        self._rows = torch.tensor(rows, device=device)
        self._columns = torch.tensor(self.starts, device=device)[:, None] + torch.arange(width, device=device)

    def write(self, buffer: Tensor, new: Tensor) -> Tensor:
        """Store the new entries [batch, heads, width, head_dim] behind the old ones; returns all that a pass reads."""
        if self._adjacent and self._even:
            start = self.starts[0]
            buffer[self._first : self._first + self._count, :, start : start + self._width] = new
        else:
            buffer[self._rows[:, None], :, self._columns] = new.transpose(1, 2)
        if self._adjacent:
            return buffer[self._first : self._first + self._count, :, : self.end]
        return buffer[self._rows, :, : self.end]


class RowBuffers(Cache):
    """The buffers of all layers. They grow by doubling and never shrink."""

    def __init__(self, layers: int) -> None:
        self.num_rows, self.capacity = 1, FIRST_CAPACITY
        self.plan: PassPlan | None = None
        super().__init__(layers=[LayerBuffers(self) for _ in range(layers)])

    def reserve(self, num_rows: int, capacity: int) -> None:
        """Make room for so many sequences of so many tokens. Where a layer finds none, the size stays what all have."""
        if num_rows <= self.num_rows and capacity <= self.capacity:
            return
        num_rows = max(self.num_rows, 1 << (num_rows - 1).bit_length())
        capacity = max(self.capacity, 1 << (capacity - 1).bit_length())
        for layer in self.layers:
            layer.grow(num_rows, capacity)
        self.num_rows, self.capacity = num_rows, capacity

    def stored(self, layer: int, row: int, length: int) -> LayerKeys:
        """Views of what one layer has stored for one sequence."""
        buffers = self.layers[layer]
        return LayerKeys(buffers.keys[row, :, :length], buffers.values[row, :, :length])

    def copy_row(self, source: int, target: int, length: int) -> None:
        for layer in self.layers:
            if layer.is_initialized:
                for buffer in (layer.keys, layer.values):
                    buffer[target, :, :length] = buffer[source, :, :length]

    def move(self, row: int, source: list[int], target: list[int], device: torch.device) -> None:
        for layer in self.layers:
            layer.move(row, torch.tensor(source, device=device), torch.tensor(target, device=device))
