"""The activation of a gated MLP: the eager reference. The Triton form is in layers/mlp_triton.py."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(both: Tensor) -> Tensor:
    """silu(gate) * up of gate and up side by side: [rows, 2 · size] -> [rows, size]"""
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
