"""How codes of few bits lie in 32-bit words on a GPU, and what number each code stands for.

A word holds codes of input features that are a fixed distance apart, and words of neighbouring features are neighbours:

    4 bits   word w of a step holds features w, w + 16, w + 32 … w + 112, the first in the lowest bits
    8 bits   word w of a step holds features w, w + 32, w + 64, w + 96
    5, 6     the lower four bits as above; element w of a second tensor, of 8 or 16 bits, holds the upper bits of the
             same eight features, the first in the lowest bits

A step is 128 input features. All output features of a step come before those of the next, so a tile is read in one run.
"""

from __future__ import annotations

from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.layers.mxfp4_experts import FP4_VALUES

STEP = 128  # input features


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

    @property
    def bits(self) -> int:
        return {Kind.INT8: 8, Kind.FP8: 8, Kind.INT5: 5, Kind.INT6: 6}.get(self, 4)

    @property
    def word_bits(self) -> int:
        """Bits of a code that are in the words."""
        return 8 if self.bits == 8 else 4

    @property
    def high_bits(self) -> int:
        """Bits of a code that are beside the words."""
        return self.bits - self.word_bits

    @property
    def offset(self) -> int:
        """What codes without zero points and minimums are too large by."""
        return {Kind.INT4: 8, Kind.INT5: 16, Kind.INT6: 32, Kind.INT8: 128}.get(self, 0)

    @property
    def codes(self) -> int:
        """Codes of a word."""
        return 32 // self.word_bits

    @property
    def words(self) -> int:
        """Words of a step."""
        return STEP // self.codes


def pack_words(codes: Tensor, kind: Kind) -> Tensor:
    """Codes uint8 [out_features, in_features] as words int32 [steps, out_features, words of a step]."""
    low = codes & ((1 << kind.word_bits) - 1) if kind.high_bits else codes
    return _packed(low, kind, kind.word_bits)


def pack_high(codes: Tensor, kind: Kind) -> Tensor | None:
    """The upper bits of codes, [steps, out_features, words of a step]; None: all bits are in the words."""
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
    return words.transpose(0, 1).contiguous()


def unpack_words(words: Tensor, kind: Kind, in_features: int, high: Tensor | None = None) -> Tensor:
    """Words, and what `pack_high` has made, as codes: uint8 [out_features, in_features]."""
    codes = _unpacked(words, kind, kind.word_bits, in_features)
    if high is None:
        return codes
    return codes | _unpacked(high, kind, kind.high_bits, in_features) << kind.word_bits


def _unpacked(words: Tensor, kind: Kind, bits: int, in_features: int) -> Tensor:
    mask = (1 << bits) - 1
    codes = [((words >> (bits * index)) & mask).to(torch.uint8) for index in range(kind.codes)]
    stacked = torch.stack(codes, dim=2).transpose(0, 1)  # [out_features, steps, codes, words]
    return stacked.reshape(words.shape[1], -1)[:, :in_features]


def decode(codes: Tensor, kind: Kind, table: Tensor | None = None) -> Tensor:
    """The numbers that codes stand for, float32; integers without their zero point where there is no table."""
    if kind is Kind.FP8:
        return codes.view(torch.float8_e4m3fn).float()
    if kind is Kind.FP4:
        table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)], device=codes.device)
    return codes.float() if table is None else table.float()[codes.to(torch.int64)]
