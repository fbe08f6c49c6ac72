"""The model: one pass of a Llama-like network, written once.

How a product, a norm or an attention is computed is the business of `Ops`: plain torch (plain.py) on any device, or
fused kernels (fused.py) on CUDA. This file is what both have in common, and it is short on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.runners.native.weights import LayerWeights, Matrix, Weights


class Ops(Protocol):
    """What a layer is made of. `batch` is whatever the attention of these ops needs to know about the pass."""

    def project(self, x: Tensor, norm: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
        """norm(x) · weightᵀ + bias"""

    def attend(self, qkv: Tensor, layer: int, weights: LayerWeights, batch: Any) -> Tensor:
        """Turn by position, store keys and values in the cache, look back. [nodes, query width]"""

    def project_add(self, x: Tensor, weight: Matrix, residual: Tensor) -> Tensor:
        """residual + x · weightᵀ"""

    def gate(self, x: Tensor, norm: Tensor, weight: Matrix) -> Tensor:
        """silu(gate(norm(x))) * up(norm(x))"""

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Root-mean-square norm."""


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """What the layers left: the stream behind the last of them, and what entered the layers asked about."""

    stream: Tensor  # [nodes, width], before the final norm
    features: Tensor | None  # [nodes, asked · width]


def run_layers(
    weights: Weights,
    stream: Tensor,
    batch: Any,
    ops: Ops,
    features: tuple[int, ...] = (),
    *,
    first: int = 0,
    last: int | None = None,
) -> States:
    """All layers, or those from `first` up to but not including `last`, over the stream [nodes, width]."""
    kept: list[Tensor] = []
    end = len(weights.layers) if last is None else last
    for seq_id in range(first, end):
        layer = weights.layers[seq_id]
        if seq_id in features:
            kept.append(stream.clone())
        qkv = ops.project(stream, layer.attention_norm, layer.qkv, layer.qkv_bias)
        seen = ops.attend(qkv, seq_id, layer, batch)
        stream = ops.project_add(seen, layer.output, stream)
        inner = ops.gate(stream, layer.mlp_norm, layer.gate_up)
        stream = ops.project_add(inner, layer.down, stream)
    if end in features:
        kept.append(stream.clone())
    return States(stream, torch.cat(kept, dim=-1) if kept else None)
