"""Weights by their role, and what one layer has of them and keeps of a sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from math import ceil


class WeightRole(Enum):
    """What a weight is for; quantisation schemes treat these roles differently."""

    EMBEDDING = "embedding"
    HEAD = "head"
    VALUE = "attention value"
    OUT = "attention output"
    ATTENTION = "attention query and key"
    DOWN = "mlp down"
    MLP = "mlp up and gate"
    SMALL = "norms, biases, routers"
    OTHER = "outside the decoder"


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """Weights of one role: how many there are, how many of them one token uses, and the length of a row.

    row_size is the number of columns of the matrix; block-wise quantisation needs a multiple of its block.
    routed: of experts, of which every token uses others.
    """

    role: WeightRole
    count: int
    used: int
    row_size: int
    routed: bool = False


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """One layer: its weights, and what it keeps of a sequence.

    kv_values     numbers for each token
    window        the most tokens that it looks back on; None: all
    state_values  numbers of a recurrent state, kept in float32, for the whole sequence
    conv_values   numbers of the inputs of a convolution, likewise
    input_values  numbers that our own code keeps of each of the last tokens, instead of a second state to go back to
    """

    groups: tuple[WeightGroup, ...]
    kv_values: int = 0
    window: int | None = None
    state_values: int = 0
    conv_values: int = 0
    input_values: int = 0

    def shared_by(self, gpus: int) -> LayerSizes:
        """What one of several GPUs holds: matrices and states are divided, norms are not."""
        return replace(
            self,
            groups=tuple(_divided(group, gpus) for group in self.groups),
            kv_values=ceil(self.kv_values / gpus),
            state_values=ceil(self.state_values / gpus),
            conv_values=ceil(self.conv_values / gpus),
            input_values=ceil(self.input_values / gpus),
        )


def _divided(group: WeightGroup, gpus: int) -> WeightGroup:
    if group.role is WeightRole.SMALL:
        return group
    return replace(group, count=ceil(group.count / gpus), used=ceil(group.used / gpus))
