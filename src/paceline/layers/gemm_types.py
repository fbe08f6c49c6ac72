"""What linear layers and the launcher of their kernels agree on: the protocol of a linear layer, and its products.

A linear layer answers for its own format: how it multiplies eagerly, whether it rounds its input, and how its Triton
kernel is launched. Callers never look at the class of a weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.layers.cpu_kernels import WeightBlocks
from paceline.layers.weight_pieces import Pieces


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


@dataclass(frozen=True, slots=True, eq=False)
class GemmOutput:
    """A product. With an argmax epilogue: the best value and column of each row, still one a program."""

    out: Tensor  # [rows, columns]
    best_value: Tensor  # float32 [rows, programs]; not read where there is one program
    best_index: Tensor  # integers [rows, programs]


class Gemm(Protocol):
    """What a linear layer asks of the launcher of its kernels (layers/gemm.py)."""

    eps: float
    none: Tensor  # stands for a tensor that a kernel does not read
    use_pdl: bool  # kernels start before the one ahead has ended
    pdl_launch: dict[str, Any]

    def fits_vector(self, x: Tensor) -> bool:
        """Whether the rows and the input size fit vector_kernel."""

    def tile_rows(self, rows: int) -> int:
        """Rows of the tile that so many rows are cut into."""

    def normed(self, x: Tensor, epilogue: Epilogue) -> Tensor:
        """The input of a kernel that does not norm by itself."""

    def buffers(self, x: Tensor, columns: int, columns_per_program: int, epilogue: Epilogue) -> GemmOutput:
        """Memory for a product; for its argmax too where the epilogue names one."""

    def flags(self, epilogue: Epilogue, *, use_pdl: bool = True) -> dict[str, Any]:
        """The constants of every product kernel, and how it is launched."""

    def or_none(self, tensor: Tensor | None) -> Tensor:
        """The tensor, or the one that stands for none."""


@dataclass(frozen=True, slots=True, eq=False)
class SavedWeight:
    """A linear layer as it is written to a file. kind: who reads it (quantization/converted.py)."""

    kind: str
    tensors: dict[str, Tensor]
    numbers: dict[str, int]


class StoredEmbedding(Protocol):
    """A matrix that is read row by row, in the format of a linear layer."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows."""

    @property
    def linear(self) -> Linear:
        """The same weight as a linear layer: an LM head that is tied to the embedding."""

    def __getitem__(self, tokens: Tensor) -> Tensor:
        """The rows of these tokens. [*tokens, hidden_size]"""


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

    @property
    def kernel_rows(self) -> int:
        """Rows that its own kernel takes even where an unquantized weight goes to cuBLAS; 0: none."""
        return 0

    @property
    def matrix(self) -> Tensor | None:
        """The weight, where it is one matrix in floating point."""
        return None

    @property
    def blocks(self) -> tuple[WeightBlocks, ...] | None:
        """The weight, where the compiled CPU kernels multiply by it: pieces, joined by rows."""
        return None

    @property
    def pass_pieces(self) -> Pieces | None:
        """The weight, where the kernel of a whole pass multiplies by it."""
        return None

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The eager product. [rows, out_features]"""

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight as one matrix [out_features, in_features], for products of many rows through cuBLAS."""

    def first_rows(self, count: int) -> Linear | None:
        """The first rows of the weight, without a copy; None: they cannot be read alone."""
        return None

    def as_embedding(self, dtype: torch.dtype) -> StoredEmbedding | None:
        """The same weight read row by row; None: it has to be unpacked for that."""
        return None

    def saved(self) -> SavedWeight | None:
        """What a file keeps of a weight that was converted at load; None: it cannot be kept."""
        return None

    def launch(self, gemm: Gemm, x: Tensor, epilogue: Epilogue) -> GemmOutput | None:
        """Launch this format's Triton kernel; None: it has none, and the dequantized weight is multiplied."""
        return None
