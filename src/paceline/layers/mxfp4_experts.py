"""Matrices of experts that stay in MXFP4: four-bit floats (e2m1), two a byte, and one power of two for every 32.

The kernels of layers/moe_triton.py turn them into numbers in registers; every number is exact in the dtype of the
product, so a row's output has the same bits as with unpacked weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.layers.gemm_types import Linear

GROUP_SIZE = 32  # numbers that share an exponent
EXPONENT_BIAS = 127
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4Matrices:
    """The matrices of all experts of a layer, one behind the other."""

    codes: Tensor  # uint8 [experts, rows, columns / 2]: the first of two in the low half
    exponents: Tensor  # uint8 [experts, rows, columns / 32]: each plus 127
    dtype: torch.dtype  # of the numbers in a product

    @property
    def shape(self) -> tuple[int, int, int]:
        experts, rows, pairs = self.codes.shape
        return experts, rows, 2 * pairs

    def __len__(self) -> int:
        return self.codes.shape[0]

    def linears(self) -> list[Mxfp4Linear]:
        """Each matrix by itself."""
        return [Mxfp4Linear(codes, exponents, self.dtype) for codes, exponents in zip(self.codes, self.exponents)]


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4Linear(Linear):
    """One expert's matrix. It is unpacked for every eager product: the kernels are what is quick."""

    codes: Tensor  # uint8 [out_features, in_features / 2]
    exponents: Tensor  # uint8 [out_features, in_features / 32]
    dtype: torch.dtype

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return 2 * self.codes.shape[1]

    @property
    def quantizes_input(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.exponents.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, self.dequantize(x.dtype), bias)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return unpacked(self.codes, self.exponents, dtype)


def unpacked(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of one matrix. [rows, columns]"""
    table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)], device=codes.device)
    numbers = table[torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).to(torch.int64)]
    factors = (exponents.float() - EXPONENT_BIAS).exp2()
    groups = numbers.view(*factors.shape, GROUP_SIZE) * factors[..., None]
    return groups.flatten(1).to(dtype)
