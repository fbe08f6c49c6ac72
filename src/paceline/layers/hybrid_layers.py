"""The two kinds of layers of hybrid models: gated delta nets, and attention whose output has a gate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

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
class Projection:
    """A linear layer whose columns are read in another order than its checkpoint stores them in. None: the same."""

    linear: Linear
    order: Tensor | None = None
    bias: Tensor | None = None

    def __call__(self, hidden_states: Tensor, norm: Norm, ops: Ops) -> Tensor:
        projected = ops.project(hidden_states, norm, self.linear, self.bias)
        return projected if self.order is None else projected.index_select(-1, self.order)


@dataclass(frozen=True, slots=True, eq=False)
class HybridLayer:
    """What both kinds share: a norm, two projections around what mixes tokens, and an MLP.

    number  among the layers of its kind: where its state, or its keys and values, are
    """

    number: int
    norm: Norm
    projection: Projection
    output: Projection
    mlp_norm: Norm
    mlp: Mlp

    def __call__(self, hidden_states: Tensor, index: int, ops: Ops, batch: Any) -> Tensor:
        """hidden_states [nodes, hidden_size] through the layer, whose place in the model is `index`."""
        mixed = self.mix(self.projection(hidden_states, self.norm, ops), ops, batch)
        states = ops.project_add(mixed, self.output.linear, hidden_states, self.output.bias)
        return self.mlp(states, self.mlp_norm, states, PLAIN_ADD, ops, batch)

    def mix(self, projected: Tensor, ops: Ops, batch: Any) -> Tensor:
        """What a node takes from the nodes before it: the input of the output projection."""
        raise NotImplementedError

    @property
    def can_fuse(self) -> bool:
        """Whether the Triton operations have everything it asks for; the model checks sizes of the recurrence."""
        return self.mlp.can_fuse

    @property
    def can_capture(self) -> bool:
        """Whether a graph can hold its eager operations: the steps of a recurrence depend on the rows of a pass."""
        return False

    def weights(self) -> None:
        """No kernel runs such a layer whole."""

    def with_linears(self, wrap: Callable[[str, Linear], Linear]) -> NoReturn:
        raise CapabilityError("LoRA adapters are for models with the layers of Llama; this one has others")

    def linears(self) -> Iterator[Linear]:
        """Every linear layer of it."""
        yield from (self.projection.linear, self.output.linear)
        yield from self.mlp.linears()


@dataclass(frozen=True, slots=True, eq=False)
class DeltaNetLayer(HybridLayer):
    """A gated delta net."""

    net: DeltaNetWeights

    def mix(self, projected: Tensor, ops: Ops, batch: Any) -> Tensor:
        return ops.delta_net(projected, self.net, self.number, batch)


@dataclass(frozen=True, slots=True, eq=False)
class GatedAttentionLayer(HybridLayer):
    """Attention, whose projection also gives a gate of its output: queries, keys, values, gate."""

    attention: LayerAttention

    def mix(self, projected: Tensor, ops: Ops, batch: Any) -> Tensor:
        size = self.output.linear.in_features
        qkv, gate = projected[:, :-size], projected[:, -size:]
        return ops.attend(qkv.contiguous(), self.number, self.attention, batch) * sigmoid(gate)
