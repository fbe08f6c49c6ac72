"""Root-mean-square norm as a Triton kernel; the eager reference is in layers/norm.py."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# USE_PDL (programmatic dependent launch): a kernel starts while the kernel ahead of it is still running, loads what
# does not depend on it (its weights), then waits. It lets its own successor start only after that wait, so at most two
# kernels run at a time, and whatever was written two kernels ago is complete.


@triton.jit
def norm_kernel(x, weight, out, hidden_size, eps, USE_PDL: tl.constexpr, HIDDEN_SIZE: tl.constexpr):
    """One program a row: root-mean-square norm, rounded as transformers rounds it."""
    row = tl.program_id(0)
    column = tl.arange(0, HIDDEN_SIZE)
    ok = column < hidden_size
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    wide = tl.load(x + row * hidden_size + column, mask=ok, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / hidden_size + eps)
    gain = tl.load(weight + column, mask=ok, other=0.0)
    dtype = out.dtype.element_ty
    tl.store(out + row * hidden_size + column, (wide * scale).to(dtype) * gain, mask=ok)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, use_pdl: bool, launch: dict[str, Any]) -> Tensor:
    """Every row of x divided by its root mean square, times weight. launch: options of the launch."""
    out = torch.empty_like(x)
    norm_kernel[(x.shape[0],)](
        x, weight, out, x.shape[1], eps, USE_PDL=use_pdl,
        HIDDEN_SIZE=triton.next_power_of_2(x.shape[1]), num_warps=8, **launch,
    )
    return out
