"""The activation of a gated MLP as a Triton kernel; the eager reference is in layers/mlp.py.

It follows a cuBLAS product. The products of narrow passes apply the gate themselves (layers/linear_triton.py).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024  # of one program


@triton.jit
def silu_mul_kernel(both, out, size, BLOCK_COLUMNS: tl.constexpr):
    """silu(gate) * up, where `both` holds gate and up of a row side by side."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    ok = column < size
    gate = tl.load(both + row * 2 * size + column, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * size + size + column, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=ok)


def silu_mul(both: Tensor) -> Tensor:
    """silu(gate) * up of gate and up side by side: [rows, 2 · size] -> [rows, size]"""
    rows, size = both.shape[0], both.shape[1] // 2
    out = torch.empty(rows, size, dtype=both.dtype, device=both.device)
    silu_mul_kernel[(rows, triton.cdiv(size, COLUMNS))](both, out, size, BLOCK_COLUMNS=COLUMNS)
    return out
