"""The decoder layer: attention and an MLP, each behind a norm and added to the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.layers.attention import NO_HEAD_NORMS, PLAIN_ATTENTION, HeadNorms, LayerAttention
from paceline.layers.cpu_kernels import WeightBlocks
from paceline.layers.feed_forward import Mlp
from paceline.layers.gemm_types import Linear
from paceline.layers.norm import Norm
from paceline.layers.ops import Ops
from paceline.layers.residual import PLAIN_ADD, ResidualAdd
from paceline.layers.weight_pieces import Pieces


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
    pieces: tuple[Pieces | None, ...] = ()  # of qkv, output, gate and up, down

    @property
    def is_plain(self) -> bool:
        """Whether every product multiplies by one matrix in floating point, and norms are of its type."""
        norms = (self.attention_norm, self.mlp_norm, self.query_norm, self.key_norm)
        types = {norm.dtype for norm in norms if norm is not None}
        matrices = (self.qkv, self.output, self.gate_up, self.down)
        return all(matrix is not None and {matrix.dtype} == types for matrix in matrices)

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
    """Weights of one layer, and their wiring: attention and an MLP, each behind a norm and added to what came before.

    q, k and v are one linear layer. What is not Llama's has a default that is: norms of whole projections, how a part
    is added to the residual stream, and `parallel`: the MLP reads what attention has read, not its output.
    """

    attention_norm: Norm | None
    qkv: Linear
    output: Linear
    mlp_norm: Norm | None
    mlp: Mlp
    qkv_bias: Tensor | None = None
    output_bias: Tensor | None = None
    attention: LayerAttention = PLAIN_ATTENTION
    projection_norms: HeadNorms = NO_HEAD_NORMS  # of all queries of a node together, and of all its keys
    attention_add: ResidualAdd = PLAIN_ADD
    mlp_add: ResidualAdd = PLAIN_ADD
    parallel: bool = False

    def __call__(self, hidden_states: Tensor, index: int, ops: Ops, batch: Any) -> Tensor:
        """hidden_states [nodes, hidden_size] through layer number `index`."""
        qkv = ops.project(hidden_states, self.attention_norm, self.qkv, self.qkv_bias)
        attended = ops.attend(self._normed(qkv, ops), index, self.attention, batch)
        states = self.attention_add.project(attended, self.output, self.output_bias, hidden_states, ops)
        return self.mlp(hidden_states if self.parallel else states, self.mlp_norm, states, self.mlp_add, ops, batch)

    def _normed(self, qkv: Tensor, ops: Ops) -> Tensor:
        """Queries and keys, normed where the architecture norms whole projections."""
        query, key = self.projection_norms.query, self.projection_norms.key
        if query is None or key is None:
            return qkv
        keys_start, keys_end = query.shape[0], query.shape[0] + key.shape[0]
        queries, keys, values = qkv[:, :keys_start], qkv[:, keys_start:keys_end], qkv[:, keys_end:]
        normed = [ops.norm(part.contiguous(), Norm(weight)) for part, weight in ((queries, query), (keys, key))]
        return torch.cat([*normed, values], dim=1)

    def with_linears(self, wrap: Callable[[str, Linear], Linear]) -> DecoderLayer:
        """The same layer with each linear layer wrapped, by its name in models/lora.py. Raises CapabilityError."""
        qkv, output = wrap("qkv", self.qkv), wrap("output", self.output)
        return replace(self, qkv=qkv, output=output, mlp=self.mlp.with_linears(wrap))

    def weights(self) -> LayerWeights | None:
        """Its tensors, for a kernel that runs the whole layer; None: it has parts that Llama's has not."""
        mlp, norms = self.mlp.gated_linears(), self.attention.norms
        attention_norm, mlp_norm = (_rms_weight(norm) for norm in (self.attention_norm, self.mlp_norm))
        if mlp is None or attention_norm is None or mlp_norm is None or not self._is_wired_like_llama:
            return None
        return LayerWeights(
            attention_norm, self.qkv.matrix, self.qkv_bias, self.output.matrix, self.output_bias, mlp_norm,
            mlp.gate_up.matrix, mlp.down.matrix, norms.query, norms.key,
            self.qkv.blocks, self.output.blocks, mlp.gate_up.blocks, mlp.down.blocks,
            tuple(linear.pass_pieces for linear in (self.qkv, self.output, mlp.gate_up, mlp.down)),
        )  # fmt: skip

    @property
    def _is_wired_like_llama(self) -> bool:
        plain = self.attention.is_plain and self.attention_add.is_plain and self.mlp_add.is_plain
        return plain and self.projection_norms.query is None and not self.parallel

    @property
    def can_fuse(self) -> bool:
        """Whether the Triton operations have everything it asks for."""
        return self.mlp.can_fuse

    @property
    def can_capture(self) -> bool:
        """Whether a graph can hold its eager operations."""
        return self.mlp.can_fuse

    def linears(self) -> Iterator[Linear]:
        """Every linear layer of it."""
        yield from (self.qkv, self.output)
        yield from self.mlp.linears()


def _rms_weight(norm: Norm | None) -> Tensor | None:
    return None if norm is None else norm.rms_weight
