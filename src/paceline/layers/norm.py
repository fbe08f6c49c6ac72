"""Root-mean-square norm: the eager reference. The Triton form is in layers/norm_triton.py."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Every row of x divided by its root mean square, times weight."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)
