"""What a decoder layer is made of, as one set of operations, and the eager set: the reference, for every device.

The Triton set is in layers/triton_ops.py. An architecture is wired once, over `Ops`; the runner chooses the set.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.layers.attention import EagerAttention, EagerBatch, HeadNorms, LayerAttention
from paceline.layers.gemm_types import Linear
from paceline.layers.mlp import silu_mul
from paceline.layers.norm import rms_norm
from paceline.layers.rope import rotate


class Ops(Protocol):
    """Operations of a layer. `batch` is what the attention of these operations needs to know about the pass."""

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root-mean-square norm."""

    def project(self, x: Tensor, norm: Tensor, linear: Linear, bias: Tensor | None) -> Tensor:
        """linear(norm(x)) + bias"""

    def attend(self, qkv: Tensor, layer: int, attention: LayerAttention, batch: Any) -> Tensor:
        """Norm heads, rotate by position, store keys and values in the cache, attend. [nodes, query size]"""

    def project_add(self, x: Tensor, linear: Linear, residual: Tensor, bias: Tensor | None = None) -> Tensor:
        """residual + linear(x) + bias"""

    def gated(self, x: Tensor, norm: Tensor, linear: Linear) -> Tensor:
        """silu(gate(norm(x))) * up(norm(x)), where the linear layer holds gate and up"""


class EagerOps:
    """Plain torch operations."""

    def __init__(self, attention: EagerAttention, eps: float) -> None:
        self.attention, self._eps = attention, eps

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._eps)

    def project(self, x: Tensor, norm: Tensor, linear: Linear, bias: Tensor | None) -> Tensor:
        return linear(self.norm(x, norm), bias)

    def project_add(self, x: Tensor, linear: Linear, residual: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, bias).add_(residual)

    def gated(self, x: Tensor, norm: Tensor, linear: Linear) -> Tensor:
        return silu_mul(linear(self.norm(x, norm)))

    def attend(self, qkv: Tensor, layer: int, attention: LayerAttention, batch: EagerBatch) -> Tensor:
        sizes = self.attention.sizes
        heads = qkv.view(qkv.shape[0], sizes.num_heads + 2 * sizes.num_kv_heads, sizes.head_dim)
        keys_end = sizes.num_heads + sizes.num_kv_heads
        rotated = self._normed(heads[:, :keys_end], attention.norms)
        if attention.rope is not None:
            rotated = rotate(rotated, batch.rotations[attention.rope])
        queries, keys = rotated[:, : sizes.num_heads], rotated[:, sizes.num_heads :]
        return self.attention(queries, keys, heads[:, keys_end:], layer, attention, batch)

    def _normed(self, heads: Tensor, norms: HeadNorms) -> Tensor:
        """Queries and keys, normed where the architecture does."""
        if norms.query is None or norms.key is None:
            return heads
        num_heads = self.attention.sizes.num_heads
        queries = self.norm(heads[:, :num_heads], norms.query)
        return torch.cat([queries, self.norm(heads[:, num_heads:], norms.key)], dim=1)
