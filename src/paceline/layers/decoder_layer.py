"""The decoder layer of Llama-like architectures: attention and a gated MLP, each behind a norm and a residual."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.layers.attention import HeadNorms
from paceline.layers.gemm_types import Linear
from paceline.layers.ops import Ops

NO_HEAD_NORMS = HeadNorms()


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """Weights of one layer, and their wiring. q, k and v are one linear layer; so are gate and up."""

    attention_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    head_norms: HeadNorms = NO_HEAD_NORMS

    def __call__(self, hidden_states: Tensor, index: int, ops: Ops, batch: Any) -> Tensor:
        """hidden_states [nodes, hidden_size] through layer number `index`."""
        qkv = ops.project(hidden_states, self.attention_norm, self.qkv, self.qkv_bias)
        attended = ops.attend(qkv, index, self.head_norms, batch)
        hidden_states = ops.project_add(attended, self.output, hidden_states, self.output_bias)
        activated = ops.gated(hidden_states, self.mlp_norm, self.gate_up)
        return ops.project_add(activated, self.down, hidden_states)

    def linears(self) -> Iterator[Linear]:
        """Every linear layer of it."""
        yield from (self.qkv, self.output, self.gate_up, self.down)
