"""How codes of few bits lie in 32-bit words on a GPU, and what number each code stands for.

A word holds codes of input features that are a fixed distance apart, and words of neighbouring features are neighbours:

    4 bits   word w of a step holds features w, w + 16, w + 32 … w + 112, the first in the lowest bits
    8 bits   word w of a step holds features w, w + 32, w + 64, w + 96

A step is 128 input features. All output features of a step come before those of the next, so a tile is read in one run.
"""

from __future__ import annotations

from enum import IntEnum

import torch
import torch.nn.functional as F
from torch import Tensor

STEP = 128  # input features


class Kind(IntEnum):
    """What a code stands for. Integers are stored with an offset: 8 in four bits and 128 in eight, or a zero point."""

    INT4 = 0
    INT8 = 1
    FP8 = 2  # e4m3
    FP4 = 3  # e2m1
    LUT4 = 4  # the place in a table of 16 numbers

    @property
    def bits(self) -> int:
        return 8 if self in (Kind.INT8, Kind.FP8) else 4

    @property
    def codes(self) -> int:
        """Codes of a word."""
        return 32 // self.bits

    @property
    def words(self) -> int:
        """Words of a step."""
        return STEP // self.codes


FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def pack_words(codes: Tensor, kind: Kind) -> Tensor:
    """Codes uint8 [out_features, in_features] as words int32 [steps, out_features, words of a step]."""
    rows, columns = codes.shape
    padded = F.pad(codes, (0, -columns % STEP)).contiguous()
    steps = padded.view(rows, -1, kind.codes, kind.words)
    words = steps[:, :, 0].to(torch.int32)
    for index in range(1, kind.codes):
        words |= steps[:, :, index].to(torch.int32) << (kind.bits * index)
    return words.transpose(0, 1).contiguous()


def unpack_words(words: Tensor, kind: Kind, in_features: int) -> Tensor:
    """Words as codes, uint8 [out_features, in_features]."""
    mask = (1 << kind.bits) - 1
    codes = [((words >> (kind.bits * index)) & mask).to(torch.uint8) for index in range(kind.codes)]
    stacked = torch.stack(codes, dim=2).transpose(0, 1)  # [out_features, steps, codes, words]
    return stacked.reshape(words.shape[1], -1)[:, :in_features]


def decode(codes: Tensor, kind: Kind, table: Tensor | None = None) -> Tensor:
    """The numbers that codes stand for, float32; integers without their zero point where there is no table."""
    if kind is Kind.FP8:
        return codes.view(torch.float8_e4m3fn).float()
    if kind is Kind.FP4:
        table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)], device=codes.device)
    return codes.float() if table is None else table.float()[codes.to(torch.int64)]
