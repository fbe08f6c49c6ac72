"""The MLP of a decoder layer: gated, or with one product before its activation. Experts are another kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from paceline.errors import CapabilityError
from paceline.layers.gemm_types import Linear
from paceline.layers.mlp import Activation
from paceline.layers.norm import Norm
from paceline.layers.ops import Ops
from paceline.layers.residual import ResidualAdd


class Mlp(Protocol):
    """What a decoder layer runs after attention."""

    def __call__(
        self, x: Tensor, norm: Norm | None, residual: Tensor, add: ResidualAdd, ops: Ops, batch: Any = None
    ) -> Tensor:
        """The output for norm(x) [nodes, hidden_size], added to `residual` as `add` says. batch: the pass."""

    @property
    def can_fuse(self) -> bool:
        """Whether the Triton operations have everything it asks for, and graphs can hold it."""
        return True

    def linears(self) -> Iterator[Linear]:
        """Every linear layer of it."""

    def with_linears(self, wrap: Callable[[str, Linear], Linear]) -> Mlp:
        """The same with each linear layer wrapped, by its name in models/lora.py. Raises CapabilityError."""
        raise CapabilityError("LoRA adapters are for models with the MLP of Llama; this one has another")

    def gated_linears(self) -> GatedLinears | None:
        """Its linear layers, where it is silu(gate) * up without biases; None: another kind."""
        return None


@dataclass(frozen=True, slots=True, eq=False)
class GatedLinears:
    """The linear layers of Llama's MLP."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, eq=False)
class GatedMlp(Mlp):
    """down(activation(gate(x)) * up(x)); gate and up are one linear layer."""

    gate_up: Linear
    down: Linear
    activation: Activation = Activation.SILU
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def __call__(
        self, x: Tensor, norm: Norm | None, residual: Tensor, add: ResidualAdd, ops: Ops, batch: Any = None
    ) -> Tensor:
        activated = ops.gated(x, norm, self.gate_up, self.gate_up_bias, self.activation)
        return add.project(activated, self.down, self.down_bias, residual, ops)

    def linears(self) -> Iterator[Linear]:
        yield from (self.gate_up, self.down)

    def with_linears(self, wrap: Callable[[str, Linear], Linear]) -> GatedMlp:
        return replace(self, gate_up=wrap("gate_up", self.gate_up), down=wrap("down", self.down))

    def gated_linears(self) -> GatedLinears | None:
        plain = self.activation is Activation.SILU and self.gate_up_bias is None and self.down_bias is None
        return GatedLinears(self.gate_up, self.down) if plain else None


@dataclass(frozen=True, slots=True, eq=False)
class PlainMlp(Mlp):
    """down(activation(up(x)))"""

    up: Linear
    down: Linear
    activation: Activation
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def __call__(
        self, x: Tensor, norm: Norm | None, residual: Tensor, add: ResidualAdd, ops: Ops, batch: Any = None
    ) -> Tensor:
        activated = self.activation(ops.project(x, norm, self.up, self.up_bias))
        return add.project(activated, self.down, self.down_bias, residual, ops)

    def linears(self) -> Iterator[Linear]:
        yield from (self.up, self.down)

    def with_linears(self, wrap: Callable[[str, Linear], Linear]) -> PlainMlp:
        if wrap("gate_up", self.up) is not self.up:
            raise CapabilityError("the LoRA adapter changes the gate of an MLP, and the MLP of this model has none")
        return replace(self, down=wrap("down", self.down))
