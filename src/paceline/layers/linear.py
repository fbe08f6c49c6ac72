"""The unquantized linear layer. Quantized ones are in quantization/."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.layers.cpu_kernels import WeightBlocks, float_blocks
from paceline.layers.gemm_types import Epilogue, Gemm, GemmOutput, Linear
from paceline.layers.weight_pieces import PieceFormat, Pieces, WeightPiece


@dataclass(frozen=True, slots=True, eq=False)
class UnquantizedLinear(Linear):
    """A weight as it is stored, in floating point."""

    weight: Tensor  # [out_features, in_features]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def quantizes_input(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def matrix(self) -> Tensor | None:
        return self.weight

    @property
    def blocks(self) -> tuple[WeightBlocks, ...] | None:
        whole = float_blocks(self.weight)
        return None if whole is None else (whole,)

    @property
    def pass_pieces(self) -> Pieces | None:
        if self.weight.dtype != torch.bfloat16 or not self.weight.is_contiguous():
            return None
        return (WeightPiece(PieceFormat.PLAIN, self.out_features, self.in_features, self.weight),)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, self.weight, bias)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype)

    def first_rows(self, count: int) -> UnquantizedLinear:
        return UnquantizedLinear(self.weight[:count])

    def launch(self, gemm: Gemm, x: Tensor, epilogue: Epilogue) -> GemmOutput | None:
        from paceline.layers.linear_triton import launch_unquantized

        return launch_unquantized(gemm, x, self.weight, epilogue)
