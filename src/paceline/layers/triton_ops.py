"""The operations of a layer as fused Triton kernels. The eager reference is in layers/ops.py."""

from __future__ import annotations

from torch import Tensor

from paceline.layers.attention import LayerAttention
from paceline.layers.attention_triton import TritonAttention, TritonBatch
from paceline.layers.gemm import GemmLauncher, GemmPath
from paceline.layers.gemm_types import Epilogue, GemmOutput, Linear
from paceline.layers.linear_triton import ArgmaxResult, argmax


class TritonOps:
    """Fused kernels: each product carries its norm, bias, gate, residual or argmax."""

    def __init__(self, gemm: GemmLauncher, attention: TritonAttention) -> None:
        self.gemm, self.attention = gemm, attention

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.gemm.norm(x, weight)

    def project(self, x: Tensor, norm: Tensor, linear: Linear, bias: Tensor | None) -> Tensor:
        return self.gemm.product(x, linear, Epilogue(norm=norm, bias=bias)).out

    def project_add(self, x: Tensor, linear: Linear, residual: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.gemm.product(x, linear, Epilogue(residual=residual, bias=bias)).out

    def gated(self, x: Tensor, norm: Tensor, linear: Linear) -> Tensor:
        return self.gemm.product(x, linear, Epilogue(norm=norm, gate=True)).out

    def attend(self, qkv: Tensor, layer: int, attention: LayerAttention, batch: TritonBatch) -> Tensor:
        return self.attention(qkv, layer, attention, batch)

    def logits(self, x: Tensor, norm: Tensor, linear: Linear) -> GemmOutput:
        """Logits in float32 and the best column of each row, from one pass over the LM head."""
        return self.gemm.product(x, linear, Epilogue(norm=norm, argmax=True))

    def argmax(self, logits: GemmOutput, embedding: Tensor | None = None) -> ArgmaxResult:
        """The best token of each row; embedding: with its input vector."""
        return argmax(self.gemm, logits, embedding)

    def path(self, rows: int) -> GemmPath:
        """How so many rows are multiplied."""
        return self.gemm.path(rows)
