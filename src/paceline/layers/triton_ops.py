"""The operations of a layer as fused Triton kernels. The eager reference is in layers/ops.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.layers.attention import LayerAttention
from paceline.layers.attention_triton import TritonAttention, TritonBatch
from paceline.layers.gemm import GemmLauncher, GemmPath
from paceline.layers.gemm_types import Epilogue, GemmOutput, Linear
from paceline.layers.linear_attention import DeltaNetWeights
from paceline.layers.linear_attention_triton import launch_delta_net
from paceline.layers.linear_triton import ArgmaxResult, argmax
from paceline.layers.mlp import Activation, gated
from paceline.layers.moe import MixtureOfExperts, SharedExpert
from paceline.layers.moe_triton import ExpertKernels, RealRows
from paceline.layers.norm import Norm


class TritonOps:
    """Fused kernels: each product carries its norm, bias, gate, residual or argmax.

    What is rarer follows a product by itself: layer norms, norms after a product, multipliers, other activations.
    """

    def __init__(self, gemm: GemmLauncher, attention: TritonAttention) -> None:
        self.gemm, self.attention = gemm, attention
        self._experts = ExpertKernels(gemm.use_pdl)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return self.gemm.norm(x, norm)

    def norm_add(self, x: Tensor, norm: Norm, residual: Tensor) -> Tensor:
        return self.gemm.norm(x, norm, residual)

    def project(self, x: Tensor, norm: Norm | None, linear: Linear, bias: Tensor | None = None) -> Tensor:
        return self._product(x, norm, linear, Epilogue(bias=bias)).out

    def project_add(
        self, x: Tensor, linear: Linear, residual: Tensor, bias: Tensor | None = None, multiplier: float = 1.0
    ) -> Tensor:
        if multiplier != 1.0:
            return torch.add(residual, self.project(x, None, linear, bias), alpha=multiplier)
        return self.gemm.product(x, linear, Epilogue(residual=residual, bias=bias)).out

    def gated(
        self,
        x: Tensor,
        norm: Norm | None,
        linear: Linear,
        bias: Tensor | None = None,
        activation: Activation = Activation.SILU,
    ) -> Tensor:
        if activation is Activation.SILU and bias is None:
            return self._product(x, norm, linear, Epilogue(gate=True)).out
        return gated(self.project(x, norm, linear, bias), activation)

    def mixture(
        self,
        x: Tensor,
        norm: Norm | None,
        mixture: MixtureOfExperts,
        batch: TritonBatch | None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Padding chooses no experts: reading theirs would cost as much as those of a real row."""
        normed = x if norm is None else self.norm(x, norm)
        if mixture.shared is not None:
            residual = self._shared(normed, mixture.shared, residual)
        logits = self.project(normed, None, mixture.router.linear, mixture.router.bias)
        real = None if batch is None else RealRows(batch.counts, batch.nodes)
        return self._experts(normed, logits, mixture, residual, real)

    def _shared(self, x: Tensor, shared: SharedExpert, residual: Tensor | None) -> Tensor:
        out = self.project(self.gated(x, None, shared.gate_up), None, shared.down)
        if shared.gate is not None:
            out = torch.sigmoid(self.project(x, None, shared.gate)) * out
        return out if residual is None else residual + out

    def attend(self, qkv: Tensor, layer: int, attention: LayerAttention, batch: TritonBatch) -> Tensor:
        return self.attention(qkv, layer, attention, batch)

    def delta_net(self, projected: Tensor, net: DeltaNetWeights, layer: int, batch: TritonBatch) -> Tensor:
        assert batch.recurrent is not None, "the model has recurrent layers"
        pdl: dict[str, Any] = {"use_pdl": self.gemm.use_pdl, "launch": self.gemm.pdl_launch}
        return launch_delta_net(projected, net, layer, batch.recurrent, self.gemm.eps, **pdl)

    def logits(self, x: Tensor, norm: Norm, linear: Linear, bias: Tensor | None = None) -> GemmOutput:
        """Logits in float32 and the best column of each row, from one pass over the LM head."""
        return self._product(x, norm, linear, Epilogue(bias=bias, argmax=True))

    def argmax(self, logits: GemmOutput, embedding: Tensor | None = None) -> ArgmaxResult:
        """The best token of each row; embedding: with its input vector."""
        return argmax(self.gemm, logits, embedding)

    def path(self, rows: int) -> GemmPath:
        """How so many rows are multiplied."""
        return self.gemm.path(rows)

    def _product(self, x: Tensor, norm: Norm | None, linear: Linear, epilogue: Epilogue) -> GemmOutput:
        """A product with the norm before it: inside it, where the norm is of the usual kind."""
        if norm is not None and norm.rms_weight is None:
            x, norm = self.norm(x, norm), None
        weight = None if norm is None else norm.rms_weight
        return self.gemm.product(x, linear, replace(epilogue, norm=weight))
