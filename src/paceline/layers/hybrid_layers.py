"""The two kinds of layers of hybrid models: gated delta nets, and attention whose output has a gate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from paceline.errors import CapabilityError
from paceline.layers.attention import LayerAttention
from paceline.layers.feed_forward import Mlp
from paceline.layers.gemm_types import Linear
from paceline.layers.linear_attention import DeltaNetWeights, sigmoid
from paceline.layers.norm import Norm
from paceline.layers.ops import Ops
from paceline.layers.residual import PLAIN_ADD


@dataclass(frozen=True, slots=True, eq=False)
class HybridLayer:
    """What both kinds share: a norm, two projections around what mixes tokens, and an MLP.

    number  among the layers of its kind: where its state, or its keys and values, are
    """

    number: int
    norm: Norm
    projection: Linear
    output: Linear
    mlp_norm: Norm
    mlp: Mlp

    def __call__(self, hidden_states: Tensor, index: int, ops: Ops, batch: Any) -> Tensor:
        """hidden_states [nodes, hidden_size] through the layer, whose place in the model is `index`."""
        mixed = self.mix(hidden_states, ops, batch)
        states = ops.project_add(mixed, self.output, hidden_states, self.output_bias)
        return self.mlp(states, self.mlp_norm, states, PLAIN_ADD, ops)

    def mix(self, hidden_states: Tensor, ops: Ops, batch: Any) -> Tensor:
        """What a node takes from the nodes before it: the input of the output projection."""
        raise NotImplementedError

    @property
    def output_bias(self) -> Tensor | None:
        return None

    @property
    def can_fuse(self) -> bool:
        """Whether the Triton operations have everything it asks for."""
        return False

    def weights(self) -> None:
        """No kernel runs such a layer whole."""

    def with_linears(self, wrap: Callable[[str, Linear], Linear]) -> NoReturn:
        raise CapabilityError("LoRA adapters are for models with the layers of Llama; this one has others")

    def linears(self) -> Iterator[Linear]:
        """Every linear layer of it."""
        yield from (self.projection, self.output)
        yield from self.mlp.linears()


@dataclass(frozen=True, slots=True, eq=False)
class DeltaNetLayer(HybridLayer):
    """A gated delta net.

    order  of the columns of its projection, where a checkpoint has them otherwise than `gated_delta_net` reads them
    """

    net: DeltaNetWeights
    order: Tensor | None = None

    def mix(self, hidden_states: Tensor, ops: Ops, batch: Any) -> Tensor:
        projected = ops.project(hidden_states, self.norm, self.projection)
        if self.order is not None:
            projected = projected.index_select(-1, self.order)
        return ops.delta_net(projected, self.net, self.number, batch)


@dataclass(frozen=True, slots=True, eq=False)
class GatedAttentionLayer(HybridLayer):
    """Attention whose query projection also gives a gate of its output: head by head, the query and then the gate."""

    head_dim: int
    attention: LayerAttention
    biases: AttentionBiases | None = None

    def mix(self, hidden_states: Tensor, ops: Ops, batch: Any) -> Tensor:
        bias = None if self.biases is None else self.biases.projection
        projected = ops.project(hidden_states, self.norm, self.projection, bias)
        size = self.output.in_features
        both = projected[:, : 2 * size].unflatten(-1, (-1, 2, self.head_dim))
        queries, gate = both[:, :, 0].flatten(1), both[:, :, 1].flatten(1)
        attended = ops.attend(torch.cat([queries, projected[:, 2 * size :]], dim=1), self.number, self.attention, batch)
        return attended * sigmoid(gate)

    @property
    def output_bias(self) -> Tensor | None:
        return None if self.biases is None else self.biases.output


@dataclass(frozen=True, slots=True, eq=False)
class AttentionBiases:
    """Of the projection of queries, gates, keys and values, and of the output."""

    projection: Tensor
    output: Tensor
