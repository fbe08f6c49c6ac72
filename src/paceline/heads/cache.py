"""Keys and values of a head for many sequences: one row of a buffer a sequence, new entries written wherever they are told."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.heads.attention import KeyValues

FIRST_CAPACITY = 256


class KeyBuffers:
    """Buffers [rows, kv heads, capacity, head size] that grow by doubling. What is valid in a row, its user knows."""

    def __init__(self, num_kv_heads: int, head_dim: int, like: Tensor) -> None:
        """like: any tensor of the head; buffers take its device and dtype."""
        self._like, self._sizes = like, (num_kv_heads, head_dim)
        self._rows, self._capacity = 0, FIRST_CAPACITY
        self._free: list[int] = []
        self.version = 0  # rises whenever the buffers move
        self._keys, self._values = self._fresh(1), self._fresh(1)

    def take(self) -> int:
        """A row for a new sequence. Low rows first: neighbours are read without copying."""
        if self._free:
            self._free.sort(reverse=True)
            return self._free.pop()
        self._rows += 1
        return self._rows - 1

    def give(self, row: int) -> None:
        """The row's sequence is over."""
        self._free.append(row)

    def at(self, rows: list[int], columns: list[int], width: int) -> PlacedKeys:
        """A store for one pass: entries of sequence i go to rows[i], from columns[i] on; all before them is seen."""
        self.reserve(max(columns) + width)
        return PlacedKeys(self._keys, self._values, rows, columns, width)

    def indexed(self, rows: Tensor, columns: Tensor, seen: int) -> IndexedKeys:
        """The same with places that lie on the device. The first `seen` columns are looked at; reserve them before."""
        return IndexedKeys(self._keys, self._values, rows, columns, seen)

    def written(self, row: int, columns: int) -> KeyValues:
        """What stands in the first columns of a row, as it lies there. Each [kv heads, columns, head size]"""
        return KeyValues(self._keys[row, :, :columns], self._values[row, :, :columns])

    def write(self, row: int, entries: KeyValues) -> None:
        """Let a row begin with these."""
        columns = entries.keys.shape[1]
        self.reserve(columns)
        self._keys[row, :, :columns], self._values[row, :, :columns] = entries.keys, entries.values

    def reserve(self, capacity: int, rows: int = 1) -> None:
        """Room for so many columns in every row that was taken, and for so many rows at least."""
        there, wanted = self._keys.shape[0], max(self._rows, rows)
        if wanted <= there and capacity <= self._capacity:
            return
        self.version += 1
        self._capacity = max(self._capacity, 1 << (capacity - 1).bit_length())
        self._keys = self._grown(self._keys, max(there, 1 << (wanted - 1).bit_length()))
        self._values = self._grown(self._values, self._keys.shape[0])

    def _grown(self, old: Tensor, rows: int) -> Tensor:
        new = self._fresh(rows)
        new[: old.shape[0], :, : old.shape[2]] = old
        return new

    def _fresh(self, rows: int) -> Tensor:
        num_kv_heads, head_dim = self._sizes
        return torch.zeros(rows, num_kv_heads, self._capacity, head_dim, dtype=self._like.dtype, device=self._like.device)


class PlacedKeys:
    """The part of the buffers one pass writes and reads."""

    def __init__(self, keys: Tensor, values: Tensor, rows: list[int], columns: list[int], width: int) -> None:
        self._keys, self._values = keys, values
        self._end = max(columns) + width
        self._row, self._count = rows[0], len(rows)
        self._neighbours = rows == list(range(rows[0], rows[0] + len(rows)))
        self._even = columns[0] if len(set(columns)) == 1 else None
        if not (self._neighbours and self._even is not None):
            self._rows = torch.tensor(rows, device=keys.device)
            first = torch.tensor(columns, device=keys.device)
            self._places = first[:, None] + torch.arange(width, device=keys.device)
        self._width = width

    def extend(self, fresh: KeyValues) -> KeyValues:
        return KeyValues(self._write(self._keys, fresh.keys), self._write(self._values, fresh.values))

    def _write(self, buffer: Tensor, fresh: Tensor) -> Tensor:
        mine = slice(self._row, self._row + self._count)
        if self._neighbours and self._even is not None:
            buffer[mine, :, self._even : self._end] = fresh
        else:
            buffer[self._rows[:, None], :, self._places] = fresh.transpose(1, 2)
        return buffer[mine, :, : self._end] if self._neighbours else buffer[self._rows, :, : self._end]


class IndexedKeys:
    """What PlacedKeys is, for a pass whose places are read from tensors: it can be captured and repeated."""

    def __init__(self, keys: Tensor, values: Tensor, rows: Tensor, columns: Tensor, seen: int) -> None:
        """rows [sequences], columns [sequences, width]"""
        self._keys, self._values, self._rows, self._columns, self._seen = keys, values, rows, columns, seen

    def extend(self, fresh: KeyValues) -> KeyValues:
        return KeyValues(self._write(self._keys, fresh.keys), self._write(self._values, fresh.values))

    def _write(self, buffer: Tensor, fresh: Tensor) -> Tensor:
        buffer[self._rows[:, None], :, self._columns] = fresh.transpose(1, 2)
        return buffer[self._rows, :, : self._seen]
