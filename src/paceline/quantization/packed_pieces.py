"""Packed weights of several formats with the same input, joined by rows: Q4_K_M keeps values in Q6_K beside Q4_K."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.layers.gemm_types import Epilogue, Gemm, GemmOutput, Linear
from paceline.layers.weight_pieces import Pieces
from paceline.quantization.packed import KERNEL_ROWS, PackedLinear


@dataclass(frozen=True, slots=True, eq=False)
class PackedPieces(Linear):
    """One launch for each piece, all of them into one output."""

    pieces: tuple[PackedLinear, ...]

    @property
    def out_features(self) -> int:
        return sum(piece.out_features for piece in self.pieces)

    @property
    def in_features(self) -> int:
        return self.pieces[0].in_features

    @property
    def quantizes_input(self) -> bool:
        return False

    @property
    def kernel_rows(self) -> int:
        return KERNEL_ROWS

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def pass_pieces(self) -> Pieces | None:
        parts = [piece.pass_pieces for piece in self.pieces]
        if any(part is None for part in parts):
            return None
        return tuple(piece for part in parts if part is not None for piece in part)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, self.dequantize(x.dtype), bias)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return torch.cat([piece.dequantize(dtype) for piece in self.pieces])

    def launch(self, gemm: Gemm, x: Tensor, epilogue: Epilogue) -> GemmOutput | None:
        """None with an argmax: the LM head is one matrix."""
        if epilogue.argmax:
            return None
        normed = gemm.normed(x, epilogue)
        dtype = torch.float32 if epilogue.gate else x.dtype
        out = torch.empty(x.shape[0], self.out_features, dtype=dtype, device=x.device)
        self._launch_pieces(gemm, normed, epilogue, out)
        if epilogue.gate:  # gate and up may be in different pieces, so the gate follows in float32
            gate, up = out.chunk(2, dim=-1)
            out = (F.silu(gate) * up).to(x.dtype)
        return GemmOutput(out, gemm.none, gemm.none)

    def _launch_pieces(self, gemm: Gemm, x: Tensor, epilogue: Epilogue, out: Tensor) -> None:
        from paceline.quantization.packed_triton import launch_packed

        first = 0
        for piece in self.pieces:
            end = first + piece.out_features
            bias = None if epilogue.bias is None else epilogue.bias[first:end]
            residual = None if epilogue.residual is None else epilogue.residual[:, first:end]
            launch_packed(gemm, x, piece, Epilogue(bias=bias, residual=residual), out=out[:, first:end])
            first = end
