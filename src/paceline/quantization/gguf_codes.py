"""Rows of GGUF files as codes and scales, for the packed kernel: every integer and every scale is the file's.

A block of the older kinds has 32 columns with one scale in half precision, and perhaps a minimum. A block of the K
kinds and of IQ4_XS has 256 columns in groups with small integers as scales, and one scale in half precision for those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import WeightsError
from paceline.layers.cpu_kernels import GROUP_SIZE, WeightKind
from paceline.quantization.packed_layout import Kind
from paceline.quantization.quantized_weight import OUTER_GROUP, BlockScales, QuantizedWeight

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
SUB_GROUP = 16  # columns of Q2_K, Q3_K and Q6_K that share a scale


@dataclass(frozen=True, slots=True)
class FileFormat:
    """How a kind lies in a file, and how it is packed.

    columns  of a block, in so many bytes
    read     makes the numbers of blocks, uint8 [rows, blocks, bytes]
    """

    columns: int
    bytes: int
    packed: Kind
    read: Callable[[Tensor], _Parts]


def columns_of(stored: Tensor, kind: WeightKind) -> int:
    """Columns of rows that are stored as uint8 [rows, bytes]."""
    form = FORMATS[kind]
    return stored.shape[1] // form.bytes * form.columns


def read_blocks(stored: Tensor, kind: WeightKind, name: str) -> QuantizedWeight:
    """Rows of a file, uint8 [rows, bytes], on any device. Raises WeightsError where a scale is no number."""
    form, rows = FORMATS[kind], stored.shape[0]
    parts = form.read(stored.contiguous().view(rows, -1, form.bytes))
    parts.check(name)
    table = torch.tensor(IQ4_VALUES, dtype=torch.float32, device=stored.device)
    return QuantizedWeight(
        form.packed,
        parts.codes.reshape(rows, columns_of(stored, kind)),
        parts.scales.reshape(rows, -1),
        parts.group_size,
        table=table if form.packed is Kind.LUT4 else None,
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


def _two_bits(packed: Tensor) -> Tensor:
    """Two bits of 256 columns: of every 32 bytes the lowest of all, and so on. [..., 64] -> [..., 256]"""
    return _bits(packed.unflatten(-1, (2, 32)), 2).flatten(-3)


def _four_bits(blocks: Tensor) -> _Parts:
    """Q4_0 and IQ4_NL: a scale and the codes."""
    return _Parts(_nibbles(blocks[..., 2:]), _half(blocks, 0), GROUP_SIZE, BlockScales())


def _four_bits_min(blocks: Tensor) -> _Parts:
    """Q4_1: a scale, a minimum and the codes."""
    return _Parts(_nibbles(blocks[..., 4:]), _half(blocks, 0), GROUP_SIZE, BlockScales(_half(blocks, 2)))


def _five_bits(blocks: Tensor) -> _Parts:
    """Q5_0: a scale and the codes."""
    return _Parts(_five(blocks[..., 2:]), _half(blocks, 0), GROUP_SIZE, BlockScales())


def _five_bits_min(blocks: Tensor) -> _Parts:
    """Q5_1: a scale, a minimum and the codes."""
    return _Parts(_five(blocks[..., 4:]), _half(blocks, 0), GROUP_SIZE, BlockScales(_half(blocks, 2)))


def _five(packed: Tensor) -> Tensor:
    """32 upper bits, then the lower four of each code."""
    high = _bits(packed[..., :4], 1).transpose(-1, -2)  # bit b of byte i belongs to column 8 · i + b
    return _nibbles(packed[..., 4:]).flatten(-2) | high.flatten(-2) << 4


def _eight_bits(blocks: Tensor) -> _Parts:
    """Q8_0: a scale and the codes, in two's complement."""
    return _Parts(blocks[..., 2:] ^ 128, _half(blocks, 0), GROUP_SIZE, BlockScales())


def _q4_k(blocks: Tensor) -> _Parts:
    return _six_bit_scales(blocks, _k_nibbles(blocks[..., 16:]))


def _q5_k(blocks: Tensor) -> _Parts:
    return _six_bit_scales(blocks, _k_nibbles(blocks[..., 48:]) | _bits(blocks[..., 16:48], 1) << 4)


def _k_nibbles(packed: Tensor) -> Tensor:
    """Of every 32 bytes the lower halves, then the upper ones. [..., 128] -> [..., 8, 32]"""
    return _nibbles(packed.unflatten(-1, (4, 32))).flatten(-3, -2)


def _six_bit_scales(blocks: Tensor, codes: Tensor) -> _Parts:
    """Two numbers in half precision, then 8 scales and 8 minimums of 6 bits in 12 bytes."""
    first, second, upper = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat([first & 63, (upper & 15) | ((first >> 2) & 48)], dim=-1)
    minimums = torch.cat([second & 63, (upper >> 4) | ((second >> 2) & 48)], dim=-1)
    return _Parts(codes, scales, GROUP_SIZE, BlockScales(minimums, _half(blocks, 0), -_half(blocks, 2)))


def _q6_k(blocks: Tensor) -> _Parts:
    """The codes' lower four bits, their upper two, 16 scales of 8 bits with a sign, and one in half precision."""
    low = _nibbles(blocks[..., :128].unflatten(-1, (2, 64))).flatten(-3)
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    codes = low | _two_bits(blocks[..., 128:192]) << 4
    return _Parts(codes, scales, SUB_GROUP, BlockScales(outer_scales=_half(blocks, 208)))


def _q3_k(blocks: Tensor) -> _Parts:
    """The codes' upper bit, their lower two, 16 scales of 6 bits in 12 bytes, and one in half precision."""
    low = _nibbles(blocks[..., 96:104]).flatten(-2)
    scales = (low | _bits(blocks[..., 104:108], 2).flatten(-2) << 4).to(torch.int8) - 32
    codes = _two_bits(blocks[..., 32:96]) | _bits(blocks[..., :32], 1).flatten(-2) << 2
    return _Parts(codes, scales, SUB_GROUP, BlockScales(outer_scales=_half(blocks, 108)))


def _q2_k(blocks: Tensor) -> _Parts:
    """16 bytes of a scale and a minimum, the codes, and two numbers in half precision."""
    outer = BlockScales(None, _half(blocks, 80), -_half(blocks, 82), nibbles=True)
    return _Parts(_two_bits(blocks[..., 16:80]), blocks[..., :16], SUB_GROUP, outer)


def _iq4_xs(blocks: Tensor) -> _Parts:
    """A number in half precision, the upper two bits of 8 scales of 6 bits, their lower four, and the codes."""
    low = _nibbles(blocks[..., 4:8]).transpose(-1, -2).flatten(-2)
    high = _bits(blocks[..., 2:4], 2).transpose(-1, -2).flatten(-2)
    scales = (low | high << 4).to(torch.int8) - 32
    codes = _nibbles(blocks[..., 8:].unflatten(-1, (8, 16)))
    return _Parts(codes, scales, GROUP_SIZE, BlockScales(outer_scales=_half(blocks, 0)))


FORMATS = {
    WeightKind.Q4_0: FileFormat(GROUP_SIZE, 18, Kind.INT4, _four_bits),
    WeightKind.Q4_1: FileFormat(GROUP_SIZE, 20, Kind.INT4, _four_bits_min),
    WeightKind.Q5_0: FileFormat(GROUP_SIZE, 22, Kind.INT5, _five_bits),
    WeightKind.Q5_1: FileFormat(GROUP_SIZE, 24, Kind.INT5, _five_bits_min),
    WeightKind.Q8_0: FileFormat(GROUP_SIZE, 34, Kind.INT8, _eight_bits),
    WeightKind.IQ4_NL: FileFormat(GROUP_SIZE, 18, Kind.LUT4, _four_bits),
    WeightKind.IQ4_XS: FileFormat(OUTER_GROUP, 136, Kind.LUT4, _iq4_xs),
    WeightKind.Q2_K: FileFormat(OUTER_GROUP, 84, Kind.INT2, _q2_k),
    WeightKind.Q3_K: FileFormat(OUTER_GROUP, 110, Kind.INT3, _q3_k),
    WeightKind.Q4_K: FileFormat(OUTER_GROUP, 144, Kind.INT4, _q4_k),
    WeightKind.Q5_K: FileFormat(OUTER_GROUP, 176, Kind.INT5, _q5_k),
    WeightKind.Q6_K: FileFormat(OUTER_GROUP, 210, Kind.INT6, _q6_k),
}
