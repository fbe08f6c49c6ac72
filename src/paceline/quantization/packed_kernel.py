"""Triton kernel of a linear layer with packed integer weights: it dequantizes them as it reads them."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.layers.gemm_kernels import store_row


@triton.jit
def _dequantized(weight, scale, row, feature, ok, in_features, groups, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Rows `row` of a packed matrix at columns `feature`, as float32. [rows, columns]"""
    row = row[:, None].to(tl.int64)
    column = feature[None, :]
    if BITS == 8:
        values = tl.load(weight + row * in_features + column, mask=ok, other=0).to(tl.float32)
    else:
        pair = tl.load(weight + row * (in_features // 2) + column // 2, mask=ok, other=0).to(tl.int32)
        values = (((pair >> (column % 2 * 4)) & 15) - 8).to(tl.float32)
    return values * tl.load(scale + row * groups + column // GROUP, mask=ok, other=0.0)


@triton.jit
def packed_kernel(
    x, weight, scale, bias, residual, out, best_value, best_index, columns, in_features, groups,
    USE_PDL: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr, ARGMAX: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):
    """project_kernel for a packed matrix: a program takes some of its rows and one row of x."""
    block = tl.program_id(0)
    row = tl.program_id(1)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    column_ok = column < columns
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    total_up = tl.zeros((COLUMNS,), dtype=tl.float32)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    for start in range(0, in_features, STEP):
        feature = start + tl.arange(0, STEP)
        inside = feature < in_features
        ok = column_ok[:, None] & inside[None, :]
        part = tl.load(x + row * in_features + feature, mask=inside, other=0.0).to(tl.float32)[None, :]
        weights = _dequantized(weight, scale, column, feature, ok, in_features, groups, BITS, GROUP)
        total += tl.sum(weights * part, axis=1)
        if GATE:
            up_weights = _dequantized(weight, scale, columns + column, feature, ok, in_features, groups, BITS, GROUP)
            total_up += tl.sum(up_weights * part, axis=1)
    store_row(
        total, total_up, bias, residual, out, best_value, best_index, row, block, columns,
        BIAS, RESIDUAL, GATE, ARGMAX, COLUMNS,
    )
