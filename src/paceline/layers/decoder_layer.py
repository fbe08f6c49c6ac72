"""The decoder layer of Llama-like architectures: attention and a gated MLP, each behind a norm and a residual."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.layers.attention import HeadNorms
from paceline.layers.cpu_kernels import WeightBlocks
from paceline.layers.gemm_types import Linear
from paceline.layers.ops import Ops

NO_HEAD_NORMS = HeadNorms()


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Everything a layer of this kind reads, for a kernel that runs it whole. None: the layer has no such part."""

    attention_norm: Tensor
    qkv: Tensor | None
    qkv_bias: Tensor | None
    output: Tensor | None
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor | None
    down: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    qkv_blocks: tuple[WeightBlocks, ...] | None = None
    output_blocks: tuple[WeightBlocks, ...] | None = None
    gate_up_blocks: tuple[WeightBlocks, ...] | None = None
    down_blocks: tuple[WeightBlocks, ...] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether every product multiplies by one matrix in floating point."""
        return all(matrix is not None for matrix in (self.qkv, self.output, self.gate_up, self.down))

    @property
    def is_blocked(self) -> bool:
        """Whether the compiled CPU kernels run the layer: every weight in blocks, every vector in float32."""
        blocks = (self.qkv_blocks, self.output_blocks, self.gate_up_blocks, self.down_blocks)
        vectors = (self.attention_norm, self.qkv_bias, self.output_bias, self.mlp_norm, self.query_norm, self.key_norm)
        in_float32 = all(vector is None or vector.dtype == torch.float32 for vector in vectors)
        return in_float32 and all(pieces is not None for pieces in blocks)

    def addresses(self) -> list[int]:
        """Where the tensors lie, in the order of the fields; 0 for none. The last is the place of a feature."""
        tensors = (
            self.attention_norm, self.qkv, self.qkv_bias, self.output, self.output_bias, self.mlp_norm,
            self.gate_up, self.down, self.query_norm, self.key_norm,
        )  # fmt: skip
        return [0 if tensor is None else tensor.data_ptr() for tensor in tensors] + [0]


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

    def with_linears(self, wrap: Callable[[str, Linear], Linear]) -> DecoderLayer:
        """The same layer with each linear layer wrapped, by its name here."""
        return replace(
            self,
            qkv=wrap("qkv", self.qkv),
            output=wrap("output", self.output),
            gate_up=wrap("gate_up", self.gate_up),
            down=wrap("down", self.down),
        )

    def weights(self) -> LayerWeights:
        """Its tensors, for a kernel that runs the whole layer."""
        norms = self.head_norms
        return LayerWeights(
            self.attention_norm, self.qkv.matrix, self.qkv_bias, self.output.matrix, self.output_bias, self.mlp_norm,
            self.gate_up.matrix, self.down.matrix, norms.query, norms.key,
            self.qkv.blocks, self.output.blocks, self.gate_up.blocks, self.down.blocks,
        )  # fmt: skip

    def linears(self) -> Iterator[Linear]:
        """Every linear layer of it."""
        yield from (self.qkv, self.output, self.gate_up, self.down)
