"""Keys and values of a head for many sequences: one row of a buffer per sequence, new entries written at any column."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from paceline.heads.attention import KeyValues

FIRST_CAPACITY = 256


class KeyBuffers:
    """Buffers [rows, num_kv_heads, capacity, head_dim] that grow by doubling. Callers know which columns are valid."""

    def __init__(self, num_kv_heads: int, head_dim: int, like: Tensor, value_dim: int | None = None) -> None:
        """like: any tensor of the head; buffers take its device and dtype. value_dim: of values; None: as of keys."""
        self._like, self._num_kv_heads = like, num_kv_heads
        self._rows, self._capacity = 0, FIRST_CAPACITY
        self._free: list[int] = []
        self.version = 0  # rises whenever the buffers move
        self._keys, self._values = (self._zeros(1, FIRST_CAPACITY, dim) for dim in (head_dim, value_dim or head_dim))

    @property
    def device(self) -> torch.device:
        return self._like.device

    @property
    def num_rows(self) -> int:
        """Rows that have memory."""
        return self._keys.shape[0]

    def take(self) -> int:
        """A row for a new sequence. Low rows first: neighbouring rows are read without a copy."""
        if self._free:
            self._free.sort(reverse=True)
            return self._free.pop()
        self._rows += 1
        return self._rows - 1

    def give(self, row: int) -> None:
        """The sequence of this row is over."""
        self._free.append(row)

    def at(self, rows: list[int], columns: list[int], num_columns: int) -> PlacedKeys:
        """A store for one pass: entries of sequence i go to rows[i], from columns[i] on; it sees all columns before."""
        self.reserve(max(columns) + num_columns)
        return PlacedKeys(self._keys, self._values, rows, columns, num_columns)

    def layers(self, rows: list[int], columns: list[int], num_columns: int, num_kv_heads: int) -> list[PlacedKeys]:
        """A store for each layer, where the heads of all layers lie side by side, num_kv_heads of each."""
        self.reserve(max(columns) + num_columns)
        parts = zip(self._keys.split(num_kv_heads, dim=1), self._values.split(num_kv_heads, dim=1))
        return [PlacedKeys(keys, values, rows, columns, num_columns) for keys, values in parts]

    def indexed_layers(self, rows: Tensor, columns: Tensor, seen: int, num_kv_heads: int) -> list[IndexedKeys]:
        """The same with rows and columns on the device."""
        parts = zip(self._keys.split(num_kv_heads, dim=1), self._values.split(num_kv_heads, dim=1))
        return [IndexedKeys(keys, values, rows, columns, seen) for keys, values in parts]

    def indexed(self, rows: Tensor, columns: Tensor, seen: int) -> IndexedKeys:
        """The same with rows and columns on the device. The first `seen` columns are read; reserve them before."""
        return IndexedKeys(self._keys, self._values, rows, columns, seen)

    def row(self, row: int) -> KeyValues:
        """Views of all columns of a row, each [num_kv_heads, capacity, head_dim]."""
        return KeyValues(self._keys[row], self._values[row])

    def written(self, row: int, columns: int) -> KeyValues:
        """Views of the first columns of a row, each [num_kv_heads, columns, head_dim]."""
        return KeyValues(self._keys[row, :, :columns], self._values[row, :, :columns])

    def write(self, row: int, entries: KeyValues, first: int = 0) -> None:
        """Write entries into the columns of a row from `first` on."""
        end = first + entries.keys.shape[1]
        self.reserve(end)
        self._keys[row, :, first:end], self._values[row, :, first:end] = entries.keys, entries.values

    def put(self, rows: Tensor, columns: Tensor, entries: KeyValues) -> None:
        """Write entries [sequences, num_kv_heads, n, head_dim] at columns [sequences, n]; reserve them before."""
        self._keys[rows[:, None], :, columns] = entries.keys.transpose(1, 2)
        self._values[rows[:, None], :, columns] = entries.values.transpose(1, 2)

    def reserve(self, capacity: int, rows: int = 1) -> None:
        """Memory for this many columns in every row in use, and for at least this many rows."""
        present, needed = self._keys.shape[0], max(self._rows, rows)
        if needed <= present and capacity <= self._capacity:
            return
        size = max(present, 1 << (needed - 1).bit_length()), max(self._capacity, 1 << (capacity - 1).bit_length())
        keys, values = self._enlarged(self._keys, *size), self._enlarged(self._values, *size)
        self._keys, self._values, self._capacity = keys, values, size[1]  # all or nothing: memory may run out above
        self.version += 1

    def _enlarged(self, old: Tensor, rows: int, capacity: int) -> Tensor:
        new = self._zeros(rows, capacity, old.shape[3])
        new[: old.shape[0], :, : old.shape[2]] = old
        return new

    def _zeros(self, rows: int, capacity: int, head_dim: int) -> Tensor:
        shape = (rows, self._num_kv_heads, capacity, head_dim)
        return torch.zeros(shape, dtype=self._like.dtype, device=self._like.device)


class PlacedKeys:
    """The part of the buffers one pass writes and reads."""

    def __init__(self, keys: Tensor, values: Tensor, rows: list[int], columns: list[int], num_columns: int) -> None:
        self._keys, self._values = keys, values
        self._end = max(columns) + num_columns
        self._row, self._count = rows[0], len(rows)
        self._adjacent = rows == list(range(rows[0], rows[0] + len(rows)))
        self._even = columns[0] if len(set(columns)) == 1 else None
        if not (self._adjacent and self._even is not None):
            self._rows = torch.tensor(rows, device=keys.device)
            first = torch.tensor(columns, device=keys.device)
            self._columns = first[:, None] + torch.arange(num_columns, device=keys.device)

    def part(self, heads: slice) -> PlacedKeys:
        """The same for some of the heads."""
        twin = copy.copy(self)
        twin._keys, twin._values = self._keys[:, heads], self._values[:, heads]
        return twin

    def extend(self, new: KeyValues) -> KeyValues:
        return KeyValues(self._write(self._keys, new.keys), self._write(self._values, new.values))

    def _write(self, buffer: Tensor, new: Tensor) -> Tensor:
        rows = slice(self._row, self._row + self._count)
        if self._adjacent and self._even is not None:
            buffer[rows, :, self._even : self._end] = new
        else:
            buffer[self._rows[:, None], :, self._columns] = new.transpose(1, 2)
        return buffer[rows, :, : self._end] if self._adjacent else buffer[self._rows, :, : self._end]


class IndexedKeys:
    """PlacedKeys with rows and columns in tensors: a CUDA graph can replay it for other sequences."""

    def __init__(self, keys: Tensor, values: Tensor, rows: Tensor, columns: Tensor, seen: int) -> None:
        """rows [sequences], columns [sequences, num_columns]"""
        self._keys, self._values, self._rows, self._columns, self._seen = keys, values, rows, columns, seen

    def part(self, heads: slice) -> IndexedKeys:
        """The same for some of the heads."""
        twin = copy.copy(self)
        twin._keys, twin._values = self._keys[:, heads], self._values[:, heads]
        return twin

    def extend(self, new: KeyValues) -> KeyValues:
        return KeyValues(self._write(self._keys, new.keys), self._write(self._values, new.values))

    def _write(self, buffer: Tensor, new: Tensor) -> Tensor:
        buffer[self._rows[:, None], :, self._columns] = new.transpose(1, 2)
        return buffer[self._rows, :, : self._seen]
