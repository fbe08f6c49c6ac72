"""What launchers of product kernels share: buffers, flags, and the choice between kernels and cuBLAS.

Three ways to multiply, by what a product waits for:
  vector  a small matrix and a row or two (a draft model's steps): norm and product in one launch without a loop
  tile    up to 16 rows, by a kernel whose sums do not depend on how many rows there are
  wide    more rows: cuBLAS, which is faster; with `batch_invariant` more and larger tiles instead

Packed weights have a kernel of their own for up to 64 rows (quantization/packed_kernel.py).
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from paceline.device.properties import fits_wide_tiles, supports_pdl
from paceline.layers.gemm_tiling import TILE_ROWS, WIDE_TILES
from paceline.layers.gemm_types import Epilogue, GemmOutput, Linear
from paceline.layers.mlp_triton import silu_mul
from paceline.layers.norm import Norm
from paceline.layers.norm_triton import launch_norm

VECTOR_IN_FEATURES = 2048  # longest row of a matrix that vector_kernel loads whole
VECTOR_ROWS = 2
MAX_SEQS = 64
MAX_NODES = 64  # of one sequence in a pass


class GemmPath(Enum):
    """How a product is computed."""

    VECTOR = auto()
    TILE = auto()
    WIDE = auto()


class GemmLauncher:
    """How products of one runner are computed.

    use_vectors      allow vector_kernel: for a draft model, whose numbers may depend on how many rows there are
    batch_invariant  a row's numbers never depend on it, in the largest batch neither
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        eps: float,
        *,
        use_vectors: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        self.eps, self.use_vectors = eps, use_vectors
        self.use_pdl = supports_pdl(device)
        self.pdl_launch: dict[str, Any] = {"launch_pdl": True} if self.use_pdl else {}
        self.none = torch.zeros(1, dtype=dtype, device=device)  # stands for a tensor that a kernel does not read
        self._max_kernel_rows = MAX_SEQS * MAX_NODES if batch_invariant else TILE_ROWS
        wide = fits_wide_tiles(device, dtype.itemsize)
        self._tiles = (TILE_ROWS, *WIDE_TILES) if wide else (TILE_ROWS,)

    def path(self, rows: int) -> GemmPath:
        """How so many rows are multiplied. The graph of one path never runs another: results or time differ."""
        if self.use_vectors and rows <= VECTOR_ROWS:
            return GemmPath.VECTOR
        return GemmPath.TILE if rows <= self._max_kernel_rows else GemmPath.WIDE

    def fits_vector(self, x: Tensor) -> bool:
        return self.use_vectors and x.shape[0] <= VECTOR_ROWS and x.shape[1] <= VECTOR_IN_FEATURES

    def tile_rows(self, rows: int) -> int:
        """Rows of the tile that so many rows are cut into: the smallest that holds them all, or the largest."""
        return next((tile for tile in self._tiles if tile >= rows), self._tiles[-1])

    def norm(self, x: Tensor, norm: Norm, residual: Tensor | None = None) -> Tensor:
        """norm(x), plus residual where there is one."""
        return launch_norm(x, norm, self.eps, residual=residual, use_pdl=self.use_pdl, launch=self.pdl_launch)

    def product(self, x: Tensor, linear: Linear, epilogue: Epilogue) -> GemmOutput:
        """x through the linear layer, with everything its epilogue names."""
        if x.shape[0] <= max(self._max_kernel_rows, linear.kernel_rows):
            output = linear.launch(self, x, epilogue)
            if output is not None:
                return output
        return self._wide(x, linear, epilogue)

    def normed(self, x: Tensor, epilogue: Epilogue) -> Tensor:
        """The input of a kernel that does not norm by itself."""
        return x if epilogue.norm is None else self.norm(x, Norm(epilogue.norm))

    def buffers(self, x: Tensor, columns: int, columns_per_program: int, epilogue: Epilogue) -> GemmOutput:
        """Memory for a product; for its argmax too where the epilogue names one."""
        if not epilogue.argmax:
            return GemmOutput(torch.empty(x.shape[0], columns, dtype=x.dtype, device=x.device), self.none, self.none)
        programs = triton.cdiv(columns, columns_per_program)
        return GemmOutput(
            torch.empty(x.shape[0], columns, dtype=torch.float32, device=x.device),
            torch.empty(x.shape[0], programs, dtype=torch.float32, device=x.device),
            torch.empty(x.shape[0], programs, dtype=torch.int32, device=x.device),
        )

    def flags(self, epilogue: Epilogue, *, use_pdl: bool = True) -> dict[str, Any]:
        """The constants of every product kernel, and how it is launched.

        use_pdl: wide tiles take half a multiprocessor each; started early, two would share one that is meant for one.
        """
        constants = {
            "BIAS": epilogue.bias is not None,
            "RESIDUAL": epilogue.residual is not None,
            "GATE": epilogue.gate,
            "ARGMAX": epilogue.argmax,
        }
        return constants | ({"USE_PDL": self.use_pdl, **self.pdl_launch} if use_pdl else {"USE_PDL": False})

    def or_none(self, tensor: Tensor | None) -> Tensor:
        return self.none if tensor is None else tensor

    def _wide(self, x: Tensor, linear: Linear, epilogue: Epilogue) -> GemmOutput:
        x, weight = self.normed(x, epilogue), linear.dequantize(x.dtype)
        if epilogue.argmax:
            logits = _wide_logits(x, weight, epilogue.bias)
            return GemmOutput(logits, self.none, logits.argmax(dim=-1, keepdim=True))
        if epilogue.residual is not None:
            out = torch.addmm(epilogue.residual, x, weight.t())
            return GemmOutput(out if epilogue.bias is None else out.add_(epilogue.bias), self.none, self.none)
        out = F.linear(x, weight, epilogue.bias)
        return GemmOutput(silu_mul(out) if epilogue.gate else out, self.none, self.none)


def _wide_logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """In float32, as a tile leaves them: rounded to 16 bits likely tokens become equal, and the first of them wins."""
    if x.device.type != "cuda" or x.dtype == torch.float32:
        return F.linear(x, weight, bias).float()
    logits = torch.mm(x, weight.t(), out_dtype=torch.float32)
    return logits if bias is None else logits + bias
