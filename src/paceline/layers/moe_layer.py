"""A mixture of experts as the MLP of a decoder layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.layers.feed_forward import Mlp
from paceline.layers.gemm_types import Linear
from paceline.layers.moe import MixtureOfExperts
from paceline.layers.norm import Norm
from paceline.layers.ops import Ops
from paceline.layers.residual import ResidualAdd


@dataclass(frozen=True, slots=True, eq=False)
class MoeMlp(Mlp):
    """Experts that a router chooses, and an expert that all rows share where there is one."""

    mixture: MixtureOfExperts

    def __call__(
        self, x: Tensor, norm: Norm | None, residual: Tensor, add: ResidualAdd, ops: Ops, batch: Any = None
    ) -> Tensor:
        if add.is_plain:
            return ops.mixture(x, norm, self.mixture, batch, residual)
        return add(ops.mixture(x, norm, self.mixture, batch), residual, ops)

    @property
    def can_fuse(self) -> bool:
        return self.mixture.can_fuse

    def linears(self) -> Iterator[Linear]:
        return self.mixture.linears()
