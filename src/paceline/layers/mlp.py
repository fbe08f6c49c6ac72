"""Activations of an MLP: the eager reference. The Triton form of the usual one is in layers/mlp_triton.py."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import torch.nn.functional as F
from torch import Tensor


class Activation(Enum):
    """What an MLP does between its products."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    RELU_SQUARED = "relu_squared"

    def __call__(self, x: Tensor) -> Tensor:
        return _functions[self](x)


_functions: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.RELU: F.relu,
    Activation.RELU_SQUARED: lambda x: F.relu(x).square(),
}
ACTIVATIONS = {  # by the names of Hugging Face configs
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU_SQUARED,
}


def silu_mul(both: Tensor) -> Tensor:
    """silu(gate) * up of gate and up side by side: [rows, 2 · size] -> [rows, size]"""
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gated(both: Tensor, activation: Activation) -> Tensor:
    """activation(gate) * up of gate and up side by side: [rows, 2 · size] -> [rows, size]"""
    gate, up = both.chunk(2, dim=-1)
    return activation(gate).mul_(up)
