"""What a decoder layer is made of, as one set of operations, and the eager set: the reference, for every device.

The Triton set is in layers/triton_ops.py. An architecture is wired once, over `Ops`; the runner chooses the set.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.layers.attention import EagerAttention, EagerBatch, HeadNorms, LayerAttention
from paceline.layers.gemm_types import Linear
from paceline.layers.linear_attention import DeltaNetWeights
from paceline.layers.mlp import Activation, gated
from paceline.layers.moe import MixtureOfExperts
from paceline.layers.norm import Norm, rms_norm
from paceline.layers.rope import rotate


class Ops(Protocol):
    """Operations of a layer. `batch` is what the attention of these operations needs to know about the pass."""

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        """norm(x)"""

    def norm_add(self, x: Tensor, norm: Norm, residual: Tensor) -> Tensor:
        """residual + norm(x)"""

    def project(self, x: Tensor, norm: Norm | None, linear: Linear, bias: Tensor | None = None) -> Tensor:
        """linear(norm(x)) + bias"""

    def attend(self, qkv: Tensor, layer: int, attention: LayerAttention, batch: Any) -> Tensor:
        """Norm heads, rotate by position, store keys and values in the cache, attend. [nodes, query size]"""

    def delta_net(self, projected: Tensor, net: DeltaNetWeights, layer: int, batch: Any) -> Tensor:
        """A gated delta net between its projections; `layer` counts those of its kind. [nodes, value size]"""

    def project_add(
        self, x: Tensor, linear: Linear, residual: Tensor, bias: Tensor | None = None, multiplier: float = 1.0
    ) -> Tensor:
        """residual + multiplier · (linear(x) + bias)"""

    def gated(
        self,
        x: Tensor,
        norm: Norm | None,
        linear: Linear,
        bias: Tensor | None = None,
        activation: Activation = Activation.SILU,
    ) -> Tensor:
        """activation(gate(norm(x))) * up(norm(x)), where the linear layer holds gate and up"""

    def mixture(
        self, x: Tensor, norm: Norm | None, mixture: MixtureOfExperts, batch: Any, residual: Tensor | None = None
    ) -> Tensor:
        """residual + mixture(norm(x)). batch: the pass, or None where all rows are real"""


class EagerOps:
    """Plain torch operations."""

    def __init__(self, attention: EagerAttention, eps: float) -> None:
        self.attention, self._eps = attention, eps

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        return norm(x, self._eps)

    def norm_add(self, x: Tensor, norm: Norm, residual: Tensor) -> Tensor:
        return residual + norm(x, self._eps)

    def project(self, x: Tensor, norm: Norm | None, linear: Linear, bias: Tensor | None = None) -> Tensor:
        return linear(x if norm is None else norm(x, self._eps), bias)

    def project_add(
        self, x: Tensor, linear: Linear, residual: Tensor, bias: Tensor | None = None, multiplier: float = 1.0
    ) -> Tensor:
        if multiplier != 1.0:
            return torch.add(residual, linear(x, bias), alpha=multiplier)
        return linear(x, bias).add_(residual)

    def gated(
        self,
        x: Tensor,
        norm: Norm | None,
        linear: Linear,
        bias: Tensor | None = None,
        activation: Activation = Activation.SILU,
    ) -> Tensor:
        return gated(linear(x if norm is None else norm(x, self._eps), bias), activation)

    def mixture(
        self, x: Tensor, norm: Norm | None, mixture: MixtureOfExperts, batch: Any, residual: Tensor | None = None
    ) -> Tensor:
        normed = x if norm is None else norm(x, self._eps)
        mixed = _by_kernels(mixture, normed) if mixture.needs_kernels(normed) else mixture(normed)
        return mixed if residual is None else mixed.add_(residual)

    def attend(self, qkv: Tensor, layer: int, attention: LayerAttention, batch: EagerBatch) -> Tensor:
        sizes = self.attention.sizes
        heads = qkv.view(qkv.shape[0], sizes.num_heads + 2 * sizes.num_kv_heads, sizes.head_dim)
        keys_end = sizes.num_heads + sizes.num_kv_heads
        rotated = self._rotated(self._normed(heads[:, :keys_end], attention.norms), attention, batch)
        queries, keys = rotated[:, : sizes.num_heads], rotated[:, sizes.num_heads :]
        return self.attention(queries, keys, heads[:, keys_end:], layer, attention, batch)

    def delta_net(self, projected: Tensor, net: DeltaNetWeights, layer: int, batch: EagerBatch) -> Tensor:
        assert batch.recurrent is not None, "the model has recurrent layers"
        return batch.recurrent(projected, net, layer, self._eps)

    def _rotated(self, heads: Tensor, attention: LayerAttention, batch: EagerBatch) -> Tensor:
        """Queries and keys, rotated where the architecture does."""
        if attention.rope is None:
            return heads
        rotation, num_heads = batch.rotations[attention.rope], self.attention.sizes.num_heads
        if attention.query_rope is None:
            return rotate(heads, rotation)
        queries = rotate(heads[:, :num_heads], batch.rotations[attention.query_rope])
        return torch.cat([queries, rotate(heads[:, num_heads:], rotation)], dim=1)

    def _normed(self, heads: Tensor, norms: HeadNorms) -> Tensor:
        """Queries and keys, normed where the architecture does."""
        if norms.query is None or norms.key is None:
            return heads
        num_heads = self.attention.sizes.num_heads
        queries = rms_norm(heads[:, :num_heads], norms.query, self._eps)
        return torch.cat([queries, rms_norm(heads[:, num_heads:], norms.key, self._eps)], dim=1)


def _by_kernels(mixture: MixtureOfExperts, x: Tensor) -> Tensor:
    """mixture(x) on a GPU."""
    from paceline.layers.moe_triton import ExpertKernels

    routed = ExpertKernels(use_pdl=False)(x, mixture.router.logits(x), mixture)
    return routed if mixture.shared is None else routed + mixture.shared(x)
