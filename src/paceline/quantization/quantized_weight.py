"""A quantized weight as every format of this room reads it: codes, scales of groups, zero points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.quantization.packed_layout import Kind, decode

OUTER_GROUP = 256  # input features of a block of GGUF's K formats


@dataclass(frozen=True, slots=True, eq=False)
class BlockScales:
    """What the blocks of GGUF files have beside codes and scales. Tensors are [out_features, groups], or in tiles.

    minimums        added to code · scale; codes have no offset then
    outer_scales    of 256 input features, what their scales are multiplied by
    outer_minimums  the same for their minimums
    nibbles         scales have four bits, and the minimums are in the upper four bits of their bytes
    """

    minimums: Tensor | None = None
    outer_scales: Tensor | None = None
    outer_minimums: Tensor | None = None
    nibbles: bool = False

    @property
    def has_minimums(self) -> bool:
        return self.nibbles or self.minimums is not None

    def mapped(self, change: Callable[[Tensor], Tensor]) -> BlockScales:
        """The same with every tensor changed."""
        tensors = (self.minimums, self.outer_scales, self.outer_minimums)
        minimums, outer_scales, outer_minimums = (None if tensor is None else change(tensor) for tensor in tensors)
        return BlockScales(minimums, outer_scales, outer_minimums, self.nibbles)

    @property
    def nbytes(self) -> int:
        tensors = (self.minimums, self.outer_scales, self.outer_minimums)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def joined_scales(parts: list[BlockScales]) -> BlockScales:
    """Those of weights that are joined by rows."""
    columns = zip(*((part.minimums, part.outer_scales, part.outer_minimums) for part in parts))
    minimums, outer_scales, outer_minimums = (None if column[0] is None else torch.cat(column) for column in columns)
    return BlockScales(minimums, outer_scales, outer_minimums, parts[0].nibbles)


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight of few bits.

    group_size  input features that share a scale
    zeros       zero points, subtracted from the codes; None: codes have the offset of their kind
    order       the input feature that each column belongs to, where columns are sorted by group (act-order)
    table       what the codes of Kind.LUT4 stand for
    rounding    the dtype that unpacked weights are rounded to first; None: that of the scales
    block       what blocks of GGUF files have beside
    """

    kind: Kind
    codes: Tensor  # uint8 [out_features, in_features]
    scales: Tensor  # [out_features, groups]
    group_size: int
    zeros: Tensor | None = None  # [out_features, groups]
    order: Tensor | None = None  # int64 [in_features]
    table: Tensor | None = None  # float32 [16]
    rounding: torch.dtype | None = None
    block: BlockScales | None = None

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight as the format's own library unpacks it. [out_features, in_features]"""
        values = decode(self.codes, self.kind, self.table)
        if self.zeros is not None:
            values -= self._by_column(self.zeros)
        elif self.block is None or not self.block.has_minimums:
            values -= self.kind.offset
        weight = self._scaled(values).to(self.rounding or self.scales.dtype).to(dtype)
        if self.order is None:
            return weight
        unsorted = torch.empty_like(weight)
        unsorted[:, self.order] = weight
        return unsorted

    def _scaled(self, values: Tensor) -> Tensor:
        """Numbers of codes times their scales, plus their minimums."""
        if self.block is None:
            return values.mul_(self._by_column(self.scales))
        scales, minimums = self.scales, self.block.minimums
        if self.block.nibbles:
            scales, minimums = scales & 15, scales >> 4
        values.mul_(self._by_column(self._within(scales, self.block.outer_scales)))
        if minimums is None:
            return values
        return values.add_(self._by_column(self._within(minimums, self.block.outer_minimums)))

    def _within(self, groups: Tensor, outer: Tensor | None) -> Tensor:
        """Numbers of groups times those of the blocks that they are in."""
        if outer is None:
            return groups
        return groups.float() * outer.float().repeat_interleave(OUTER_GROUP // self.group_size, dim=1)

    def _by_column(self, groups: Tensor) -> Tensor:
        """Numbers of groups as numbers of columns, float32."""
        if groups.shape[1] == 1:
            return groups.float()
        return groups.float().repeat_interleave(self.group_size, dim=1)[:, : self.codes.shape[1]]

    def joins(self, other: QuantizedWeight) -> bool:
        """Whether the two can be one weight."""
        same_order = self.order is other.order is None or _equal(self.order, other.order)
        return (
            same_order
            and (self.kind, self.group_size, self.scales.dtype) == (other.kind, other.group_size, other.scales.dtype)
            and (self.zeros is None, self.rounding) == (other.zeros is None, other.rounding)
            and (self.table is other.table or _equal(self.table, other.table))
            and (self.block is None) == (other.block is None)
        )


def _equal(first: Tensor | None, second: Tensor | None) -> bool:
    return first is not None and second is not None and torch.equal(first, second)


def joined(weights: list[QuantizedWeight]) -> QuantizedWeight:
    """Weights with the same input as one, by rows."""
    first = weights[0]
    zeros = None
    if first.zeros is not None:
        zeros = torch.cat([weight.zeros for weight in weights if weight.zeros is not None])
    codes, scales = (torch.cat(tensors) for tensors in zip(*((part.codes, part.scales) for part in weights)))
    block = None if first.block is None else joined_scales([part.block for part in weights if part.block is not None])
    return replace(first, codes=codes, scales=scales, zeros=zeros, block=block)


def unpack_int32(packed: Tensor, bits: int, *, dim: int) -> Tensor:
    """Integers of 4 or 8 bits out of int32 words, the lowest bits first, as uint8. dim: which one they unfold in."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    shape = [1] * (packed.dim() + 1)
    shape[dim + 1] = len(shifts)
    codes = (packed.unsqueeze(dim + 1) >> shifts.view(shape)) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(dim, dim + 1)


def sorted_by_group(weight: QuantizedWeight, groups: Tensor) -> QuantizedWeight:
    """The weight with its columns sorted by group. groups: of each input feature, as act-order stores them."""
    groups = groups.to(torch.int64)
    columns = torch.arange(groups.shape[0], device=groups.device)
    if torch.equal(groups, columns // weight.group_size):
        return weight
    order = torch.argsort(groups, stable=True)
    if torch.equal(groups[order], columns // weight.group_size):
        return replace(weight, codes=weight.codes[:, order], order=order)
    zeros = None if weight.zeros is None else weight.zeros[:, groups]
    return replace(weight, scales=weight.scales[:, groups], zeros=zeros, group_size=1)  # groups of uneven sizes
