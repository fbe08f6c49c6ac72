"""Norms: the eager reference. The Triton form is in layers/norm_triton.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """Weights of a norm: root-mean-square, or with `centers` a layer norm, which subtracts the mean first."""

    weight: Tensor
    bias: Tensor | None = None  # of a layer norm
    centers: bool = False

    def __call__(self, x: Tensor, eps: float) -> Tensor:
        """Every row of x, normed."""
        if self.centers:
            return F.layer_norm(x, (x.shape[-1],), self.weight, self.bias, eps)
        return rms_norm(x, self.weight, eps)

    @property
    def rms_weight(self) -> Tensor | None:
        """The weight, where a root-mean-square norm is all there is."""
        return None if self.centers else self.weight


def zero_centered(weight: Tensor) -> Norm:
    """A root-mean-square norm stored as its distance from one. In 16 bits 1 + weight would lose most of the weight."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return Norm(weight.to(wide) + 1.0)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Every row of x divided by its root mean square, times weight."""
    if weight.dtype == x.dtype:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, eps).to(x.dtype)
