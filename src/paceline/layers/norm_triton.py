"""Norms as a Triton kernel; the eager reference is in layers/norm.py."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.layers.norm import Norm

# USE_PDL (programmatic dependent launch): a kernel starts while the kernel ahead of it is still running, loads what
# does not depend on it (its weights), then waits. It lets its own successor start only after that wait, so at most two
# kernels run at a time, and whatever was written two kernels ago is complete.


@triton.jit
def norm_kernel(
    x, weight, bias, residual, out, hidden_size, eps,
    USE_PDL: tl.constexpr, CENTER: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, HIDDEN_SIZE: tl.constexpr,
):
    """One program a row: root-mean-square norm, rounded as transformers rounds it.

    CENTER: the mean is subtracted first, as a layer norm does. RESIDUAL: added to the rounded norm.
    """
    row = tl.program_id(0)
    column = tl.arange(0, HIDDEN_SIZE)
    ok = column < hidden_size
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    wide = tl.load(x + row * hidden_size + column, mask=ok, other=0.0).to(tl.float32)
    if CENTER:
        wide = tl.where(ok, wide - tl.sum(wide, axis=0) / hidden_size, 0.0)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden_size + eps)
    gain = tl.load(weight + column, mask=ok, other=0.0)
    dtype = out.dtype.element_ty
    if CENTER:
        normed = wide * scale * gain.to(tl.float32)
    else:
        normed = (wide * scale).to(dtype) * gain
    if BIAS:
        normed += tl.load(bias + column, mask=ok, other=0.0).to(tl.float32)
    if RESIDUAL:
        added = tl.load(residual + row * hidden_size + column, mask=ok, other=0.0).to(tl.float32)
        normed = added + normed.to(dtype).to(tl.float32)
    tl.store(out + row * hidden_size + column, normed.to(dtype), mask=ok)


def launch_norm(
    x: Tensor, norm: Norm, eps: float, *, residual: Tensor | None = None, use_pdl: bool, launch: dict[str, Any]
) -> Tensor:
    """norm(x), plus residual where there is one. launch: options of the launch."""
    out = torch.empty_like(x)
    bias, added = (x if tensor is None else tensor for tensor in (norm.bias, residual))  # x is not read there
    norm_kernel[(x.shape[0],)](
        x, norm.weight, bias, added, out, x.shape[1], eps, USE_PDL=use_pdl, CENTER=norm.centers,
        BIAS=norm.bias is not None, RESIDUAL=residual is not None,
        HIDDEN_SIZE=triton.next_power_of_2(x.shape[1]), num_warps=8, **launch,
    )
    return out
