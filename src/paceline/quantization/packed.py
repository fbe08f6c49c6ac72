"""Packed integer weights on a GPU: only the weights have fewer bits, and a kernel dequantizes them as it reads them.

That is for draft models: half or a quarter of the memory, and errors that cost nothing but acceptance.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.layers.gemm_types import Epilogue, Gemm, GemmOutput, Linear


@dataclass(frozen=True, slots=True, eq=False)
class PackedLinear(Linear):
    """Weights in 8 bits, or in 4 bits two a byte, with one scale a group of columns. Inputs stay as they are."""

    values: Tensor  # int8 [rows, columns], or uint8 [rows, columns / 2]: the even column in the low half
    scales: Tensor  # float32 [rows, groups]
    bits: int

    @property
    def out_features(self) -> int:
        return self.values.shape[0]

    @property
    def in_features(self) -> int:
        return self.values.shape[1] * 8 // self.bits

    @property
    def quantizes_input(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    @property
    def group_size(self) -> int:
        """Columns that share a scale."""
        return self.in_features // self.scales.shape[1]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight as it was, but for rounding."""
        values = self.values
        if self.bits == 4:
            values = torch.stack([values & 15, values >> 4], dim=-1).flatten(1).to(torch.int8) - 8
        grouped = values.view(values.shape[0], self.scales.shape[1], -1)
        return (grouped * self.scales[..., None]).view(self.out_features, self.in_features).to(dtype)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, self.dequantize(x.dtype), bias)

    def launch(self, gemm: Gemm, x: Tensor, epilogue: Epilogue) -> GemmOutput | None:
        from paceline.quantization.packed_triton import launch_packed

        return launch_packed(gemm, gemm.normed(x, epilogue), self, epilogue)


def pack(weight: Tensor, bits: int, group_size: int) -> PackedLinear:
    """A weight rounded to 8 or 4 bits, symmetric, with one scale for every `group_size` columns of a row."""
    rows, columns = weight.shape
    groups = weight.float().view(rows, -1, group_size)
    largest = (1 << (bits - 1)) - 1
    scales = (groups.abs().amax(dim=-1) / largest).clamp_min(1e-8)
    values = (groups / scales[..., None]).round().clamp(-largest - 1, largest).view(rows, columns)
    if bits == 8:
        return PackedLinear(values.to(torch.int8), scales, bits)
    halves = (values + 8).to(torch.uint8)
    return PackedLinear((halves[:, 1::2] << 4) | halves[:, ::2], scales, bits)
