"""How codes of few bits lie in words on a GPU, and what number each code stands for.

A word holds codes of input features that are a fixed distance apart, and words of neighbouring features are neighbours:

    4 bits   word w of a step holds features w, w + 16, w + 32 … w + 112, the first in the lowest bits
    8 bits   word w of a step holds features w, w + 32, w + 64, w + 96
    2 bits   as 4 bits, in words of 16 bits
    3, 5, 6  the lower two or four bits as above; element w of a second tensor, of 8 or 16 bits, holds the upper bits
             of the same eight features, the first in the lowest bits

A step is 128 input features, a tile 16 output features. Words of a tile lie one step after the other, and within a step
one output feature after the other, so a kernel that takes 16 output features reads one run of memory. What groups of
input features have beside the codes (scales, zero points, minimums) lies in the same tiles:

    words    [tiles, steps, 16, words of a step], and so do the upper bits
    numbers  [tiles, spans, 16, groups of a span]; a span is a step or a group, whichever has more input features

Output features beyond the last and groups beyond the last are zero.
"""

from __future__ import annotations

from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.layers.mxfp4_experts import FP4_VALUES

STEP = 128  # input features
TILE = 16  # output features


class Kind(IntEnum):
    """What a code stands for. Integers are stored with an offset, half of their range, unless a weight has zero points
    or minimums."""

    INT4 = 0
    INT8 = 1
    FP8 = 2  # e4m3
    FP4 = 3  # e2m1
    LUT4 = 4  # the place in a table of 16 numbers
    INT5 = 5
    INT6 = 6
    INT2 = 7
    INT3 = 8

    @property
    def bits(self) -> int:
        bits = {Kind.INT2: 2, Kind.INT3: 3, Kind.INT5: 5, Kind.INT6: 6, Kind.INT8: 8, Kind.FP8: 8}
        return bits.get(self, 4)

    @property
    def word_bits(self) -> int:
        """Bits of a code that are in the words."""
        return 8 if self.bits == 8 else 4 if self.bits >= 4 else 2

    @property
    def word_dtype(self) -> torch.dtype:
        return torch.int16 if self.word_bits == 2 else torch.int32

    @property
    def high_bits(self) -> int:
        """Bits of a code that are beside the words."""
        return self.bits - self.word_bits

    @property
    def offset(self) -> int:
        """What codes without zero points and minimums are too large by."""
        offsets = {Kind.INT2: 2, Kind.INT3: 4, Kind.INT4: 8, Kind.INT5: 16, Kind.INT6: 32, Kind.INT8: 128}
        return offsets.get(self, 0)

    @property
    def codes(self) -> int:
        """Codes of a word."""
        return 8 * self.word_dtype.itemsize // self.word_bits

    @property
    def words(self) -> int:
        """Words of a step."""
        return STEP // self.codes


def tiled(rows: Tensor, width: int) -> Tensor:
    """Numbers [out_features, spans · width] in tiles, [tiles, spans, 16, width], padded with zeros.

    width: numbers of one row that stay neighbours.
    """
    padded = F.pad(rows, (0, -rows.shape[1] % width, 0, -rows.shape[0] % TILE))
    return padded.view(-1, TILE, padded.shape[1] // width, width).transpose(1, 2).contiguous()


def untiled(tiles: Tensor, out_features: int) -> Tensor:
    """What `tiled` was made of, [out_features, spans · width]; columns that it has added are still there."""
    return tiles.transpose(1, 2).flatten(0, 1)[:out_features].flatten(1)


def groups_of_span(group_size: int, in_features: int) -> int:
    """Groups whose scales are neighbours in a tile: those of a step, or one."""
    return 1 if group_size >= in_features else max(1, STEP // group_size)


def pack_words(codes: Tensor, kind: Kind) -> Tensor:
    """Codes uint8 [out_features, in_features] as words [tiles, steps, 16, words of a step] of the kind's dtype."""
    low = codes & ((1 << kind.word_bits) - 1) if kind.high_bits else codes
    return _packed(low, kind, kind.word_bits).to(kind.word_dtype)


def pack_high(codes: Tensor, kind: Kind) -> Tensor | None:
    """The upper bits of codes, [tiles, steps, 16, words of a step]; None: all bits are in the words."""
    if not kind.high_bits:
        return None
    high = _packed(codes >> kind.word_bits, kind, kind.high_bits)
    return high.to(torch.uint8 if kind.high_bits == 1 else torch.int16)


def _packed(codes: Tensor, kind: Kind, bits: int) -> Tensor:
    rows, columns = codes.shape
    padded = F.pad(codes, (0, -columns % STEP)).contiguous()
    steps = padded.view(rows, -1, kind.codes, kind.words)
    words = steps[:, :, 0].to(torch.int32)
    for index in range(1, kind.codes):
        words |= steps[:, :, index].to(torch.int32) << (bits * index)
    return tiled(words.flatten(1), kind.words)


def unpack_words(words: Tensor, kind: Kind, shape: tuple[int, int], high: Tensor | None = None) -> Tensor:
    """Words, and what `pack_high` has made, as codes: uint8 of that shape, [out_features, in_features]."""
    codes = _unpacked(words, kind, kind.word_bits, shape)
    if high is None:
        return codes
    return codes | _unpacked(high, kind, kind.high_bits, shape) << kind.word_bits


def _unpacked(words: Tensor, kind: Kind, bits: int, shape: tuple[int, int]) -> Tensor:
    out_features, in_features = shape
    steps, mask = untiled(words, out_features).unflatten(1, (-1, kind.words)), (1 << bits) - 1
    codes = [((steps >> (bits * index)) & mask).to(torch.uint8) for index in range(kind.codes)]
    return torch.stack(codes, dim=2).flatten(1)[:, :in_features]  # of [out_features, steps, codes, words]


def decode(codes: Tensor, kind: Kind, table: Tensor | None = None) -> Tensor:
    """The numbers that codes stand for, float32; integers without their zero point where there is no table."""
    if kind is Kind.FP8:
        return codes.view(torch.float8_e4m3fn).float()
    if kind is Kind.FP4:
        table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)], device=codes.device)
    return codes.float() if table is None else table.float()[codes.to(torch.int64)]
