"""Rows of GGUF files as codes and scales, for the packed kernel: every integer and every scale is the file's.

A block of the older kinds has 32 columns with one scale in half precision, and perhaps a minimum. A block of Q4_K, Q5_K
and Q6_K has 256 columns in groups with small integers as scales, and one scale in half precision for those.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import WeightsError
from paceline.layers.cpu_kernels import GROUP_SIZE, WeightKind
from paceline.quantization.packed_layout import Kind
from paceline.quantization.quantized_weight import OUTER_GROUP, BlockScales, QuantizedWeight

# Bytes of 32 columns of a row in a file; those of Q4_K to Q6_K are an eighth of a block of 256.
FILE_BYTES = {
    WeightKind.Q4_0: 18, WeightKind.Q4_1: 20, WeightKind.Q5_0: 22, WeightKind.Q5_1: 24, WeightKind.Q8_0: 34,
    WeightKind.IQ4_NL: 18, WeightKind.Q4_K: 18, WeightKind.Q5_K: 22, WeightKind.Q6_K: 26.25,
}  # fmt: skip
PACKED_KINDS = {
    WeightKind.Q4_0: Kind.INT4, WeightKind.Q4_1: Kind.INT4, WeightKind.Q5_0: Kind.INT5, WeightKind.Q5_1: Kind.INT5,
    WeightKind.Q8_0: Kind.INT8, WeightKind.IQ4_NL: Kind.LUT4, WeightKind.Q4_K: Kind.INT4, WeightKind.Q5_K: Kind.INT5,
    WeightKind.Q6_K: Kind.INT6,
}  # fmt: skip
IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
HAS_MINIMUMS = (WeightKind.Q4_1, WeightKind.Q5_1)
SUB_GROUP = 16  # columns of Q6_K that share a scale


def columns_of(stored: Tensor, kind: WeightKind) -> int:
    """Columns of rows that are stored as uint8 [rows, bytes]."""
    return int(stored.shape[1] / FILE_BYTES[kind] * GROUP_SIZE)


def read_blocks(stored: Tensor, kind: WeightKind, name: str) -> QuantizedWeight:
    """Rows of a file, uint8 [rows, bytes], on any device. Raises WeightsError where a scale is no number."""
    if kind is WeightKind.Q6_K:
        parts = _q6_k(_blocks(stored, kind, OUTER_GROUP))
    elif kind in (WeightKind.Q4_K, WeightKind.Q5_K):
        parts = _k_with_minimums(_blocks(stored, kind, OUTER_GROUP), kind)
    else:
        parts = _small(_blocks(stored, kind, GROUP_SIZE), kind)
    parts.check(name)
    rows, columns = stored.shape[0], columns_of(stored, kind)
    table = torch.tensor(IQ4_NL_VALUES, dtype=torch.float32, device=stored.device)
    return QuantizedWeight(
        PACKED_KINDS[kind],
        parts.codes.reshape(rows, columns),
        parts.scales.reshape(rows, -1),
        parts.group_size,
        table=table if kind is WeightKind.IQ4_NL else None,
        rounding=torch.float32,
        block=parts.block.mapped(lambda part: part.reshape(rows, -1)),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """The numbers of blocks, by rows and blocks."""

    codes: Tensor
    scales: Tensor
    group_size: int
    block: BlockScales

    def check(self, name: str) -> None:
        outer = (self.scales, self.block.minimums, self.block.outer_scales, self.block.outer_minimums)
        halves = [part for part in outer if part is not None and part.is_floating_point()]
        if not all(bool(part.isfinite().all()) for part in halves):
            raise WeightsError(f"the tensor {name} holds values that are no numbers (NaN or infinity)")


def _blocks(stored: Tensor, kind: WeightKind, columns: int) -> Tensor:
    """uint8 [rows, blocks, bytes of a block]"""
    return stored.contiguous().view(stored.shape[0], -1, int(FILE_BYTES[kind] * columns / GROUP_SIZE))


def _half(blocks: Tensor, place: int) -> Tensor:
    """The number in half precision at a place of every block. [rows, blocks, 1]"""
    return blocks[..., place : place + 2].contiguous().view(torch.float16)


def _nibbles(packed: Tensor) -> Tensor:
    """Lower halves of bytes, then upper halves. [..., bytes] -> [..., 2, bytes]"""
    return torch.stack([packed & 15, packed >> 4], dim=-2)


def _bits(packed: Tensor, bits: int) -> Tensor:
    """Fields of so many bits, the lowest of all bytes first. [..., bytes] -> [..., 8 / bits, bytes]"""
    mask = (1 << bits) - 1
    return torch.stack([(packed >> shift) & mask for shift in range(0, 8, bits)], dim=-2)


def _small(blocks: Tensor, kind: WeightKind) -> _Parts:
    """A scale, perhaps a minimum, perhaps 32 upper bits, and the codes."""
    scales, place = _half(blocks, 0), 4 if kind in HAS_MINIMUMS else 2
    block = BlockScales(_half(blocks, 2) if kind in HAS_MINIMUMS else None)
    if kind is WeightKind.Q8_0:
        return _Parts(blocks[..., place:] ^ 128, scales, GROUP_SIZE, block)  # two's complement plus 128
    if PACKED_KINDS[kind] is not Kind.INT5:
        return _Parts(_nibbles(blocks[..., place:]), scales, GROUP_SIZE, block)
    high = _bits(blocks[..., place : place + 4], 1).transpose(-1, -2)  # bit b of byte i belongs to column 8 · i + b
    low = _nibbles(blocks[..., place + 4 :])
    return _Parts(low.flatten(-2) | high.flatten(-2) << 4, scales, GROUP_SIZE, block)


def _k_with_minimums(blocks: Tensor, kind: WeightKind) -> _Parts:
    """Two numbers in half precision, 8 scales and 8 minimums of 6 bits in 12 bytes, perhaps upper bits, the codes."""
    first, second, upper = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([first & 63, (upper & 15) | ((first >> 2) & 48)], dim=-1)
    minimums = torch.cat([second & 63, (upper >> 4) | ((second >> 2) & 48)], dim=-1)
    place = 48 if kind is WeightKind.Q5_K else 16
    codes = _nibbles(blocks[..., place:].unflatten(-1, (4, 32))).flatten(-3, -2)  # [rows, blocks, 8, 32]
    if kind is WeightKind.Q5_K:
        codes = codes | _bits(blocks[..., 16:48], 1) << 4
    return _Parts(codes, scales, GROUP_SIZE, BlockScales(minimums, _half(blocks, 0), -_half(blocks, 2)))


def _q6_k(blocks: Tensor) -> _Parts:
    """The codes' lower four bits, their upper two, 16 scales of 8 bits with a sign, and one in half precision."""
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).flatten(-2)  # [rows, blocks, 2, 128]
    high = _bits(blocks[..., 128:192].unflatten(-1, (2, 32)), 2).flatten(-2)
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return _Parts(low | high << 4, scales, SUB_GROUP, BlockScales(outer_scales=_half(blocks, 208)))
