"""Linear layers: the protocol every weight format implements, and the unquantized layer.

A linear layer answers for its own format: how it multiplies eagerly, whether it rounds its input, and how its Triton
kernel is launched. Callers never look at the class of a weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from paceline.layers.gemm import GemmLauncher, GemmOutput


@dataclass(frozen=True, slots=True, eq=False)
class Epilogue:
    """What a fused product does beside multiplying.

    norm      weight of the root-mean-square norm before the product
    bias      added to the product
    residual  added last
    gate      the weights hold gate and up: the output is silu(gate) * up
    argmax    the output is float32, with the best column of each row
    """

    norm: Tensor | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    gate: bool = False
    argmax: bool = False


class Linear(Protocol):
    """x · weightᵀ + bias, in one weight format."""

    @property
    def out_features(self) -> int:
        """Rows of the weight."""

    @property
    def in_features(self) -> int:
        """Columns of the weight."""

    @property
    def quantizes_input(self) -> bool:
        """Whether a product also rounds its input to fewer bits."""

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a product reads."""

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The eager product. [rows, out_features]"""

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight as one matrix [out_features, in_features], for products of many rows through cuBLAS."""

    def launch(self, gemm: GemmLauncher, x: Tensor, epilogue: Epilogue) -> GemmOutput | None:
        """Launch this format's Triton kernel; None: it has none, and the dequantized weight is multiplied."""


@dataclass(frozen=True, slots=True, eq=False)
class UnquantizedLinear:
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

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, self.weight, bias)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return self.weight.to(dtype)

    def launch(self, gemm: GemmLauncher, x: Tensor, epilogue: Epilogue) -> GemmOutput | None:
        from paceline.layers.linear_triton import launch_unquantized

        return launch_unquantized(gemm, x, self.weight, epilogue)
