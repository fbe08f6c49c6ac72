"""How the output of attention or an MLP is added to the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.layers.gemm_types import Linear
from paceline.layers.norm import Norm
from paceline.layers.ops import Ops


@dataclass(frozen=True, slots=True, eq=False)
class ResidualAdd:
    """residual + multiplier · norm(x), where an architecture has a norm there or a multiplier."""

    norm: Norm | None = None
    multiplier: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Whether x is added as it is."""
        return self.norm is None and self.multiplier == 1.0

    def __call__(self, x: Tensor, residual: Tensor, ops: Ops) -> Tensor:
        if self.norm is None:
            return torch.add(residual, x, alpha=self.multiplier)
        if self.multiplier == 1.0:
            return ops.norm_add(x, self.norm, residual)
        return torch.add(residual, ops.norm(x, self.norm), alpha=self.multiplier)

    def project(self, x: Tensor, linear: Linear, bias: Tensor | None, residual: Tensor, ops: Ops) -> Tensor:
        """The same for the output of a linear layer, in one product where that is possible."""
        if self.norm is None:
            return ops.project_add(x, linear, residual, bias, self.multiplier)
        return self(ops.project(x, None, linear, bias), residual, ops)


PLAIN_ADD = ResidualAdd()
