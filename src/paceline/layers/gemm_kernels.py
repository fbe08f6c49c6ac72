"""Triton kernels of linear layers for passes over a few tokens.

Such a pass is bound by reading the weights, so each kernel reads its weights once, in long rows, and does everything
else on the side: the gate inside a product, the residual after it, the argmax of the LM head. Rows of a pass never mix,
and every product sums from the first column to the last, whatever the tile. So a token's numbers are the same bits
whether it is read alone, among draft tokens or among other sequences.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# USE_PDL (programmatic dependent launch): a kernel starts while the kernel ahead of it is still running, loads what
# does not depend on it (its weights), then waits. It lets its own successor start only after that wait, so at most two
# kernels run at a time, and whatever was written two kernels ago is complete.


@triton.jit
def clamped_index(index, count):
    """An index below `count`. Rows without a sequence hold garbage, and the argmax of NaNs may be anywhere."""
    return tl.minimum(tl.maximum(index, 0), count - 1)


@triton.jit
def accumulate(part, weights, total, TRANSPOSED: tl.constexpr):
    """total + part · weightsᵀ; TRANSPOSED: + weights · partᵀ. Either way each sum runs over the columns in order."""
    if TRANSPOSED:
        return tl.dot(weights, tl.trans(part), total, input_precision="ieee")
    else:
        return tl.dot(part, tl.trans(weights), total, input_precision="ieee")


@triton.jit
def project_kernel(
    x, weight, bias, residual, out, best_value, best_index, rows, columns, in_features,
    USE_PDL: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr, ARGMAX: tl.constexpr,
    EVEN: tl.constexpr, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):
    """out [rows, columns] = x · weightᵀ, plus bias, plus residual; or silu(gate) * up; or with the argmax.

    GATE: weight holds gate and up, [2 · columns, in_features]. ARGMAX: each program also stores its
    best column and value.
    TRANSPOSED: the tile is summed with rows and columns exchanged, which suits more than 16 rows.
    """
    block = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, STEP)
    row_ok = row < rows
    column_ok = column < columns
    total = tl.zeros((COLUMNS, ROWS) if TRANSPOSED else (ROWS, COLUMNS), dtype=tl.float32)
    total_up = tl.zeros((COLUMNS, ROWS) if TRANSPOSED else (ROWS, COLUMNS), dtype=tl.float32)
    x_at = x + row[:, None] * in_features + step[None, :]
    weight_at = weight + column[:, None].to(tl.int64) * in_features + step[None, :]
    up_at = weight_at + tl.cast(columns, tl.int64) * in_features
    # The first tile of the weights does not depend on the kernel before: fetch it while that kernel finishes.
    inside = (step < in_features)[None, :]
    weights = tl.load(weight_at, mask=column_ok[:, None] & inside, other=0.0)
    if GATE:
        up_weights = tl.load(up_at, mask=column_ok[:, None] & inside, other=0.0)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    x_tile = tl.load(x_at, mask=row_ok[:, None] & inside, other=0.0)
    total = accumulate(x_tile, weights, total, TRANSPOSED)
    if GATE:
        total_up = accumulate(x_tile, up_weights, total_up, TRANSPOSED)
    for start in range(STEP, in_features, STEP):
        inside = (start + step < in_features)[None, :]
        x_ok = row_ok[:, None] if EVEN else row_ok[:, None] & inside
        w_ok = column_ok[:, None] if EVEN else column_ok[:, None] & inside
        x_tile = tl.load(x_at + start, mask=x_ok, other=0.0)
        weights = tl.load(weight_at + start, mask=w_ok, other=0.0)
        total = accumulate(x_tile, weights, total, TRANSPOSED)
        if GATE:
            up_weights = tl.load(up_at + start, mask=w_ok, other=0.0)
            total_up = accumulate(x_tile, up_weights, total_up, TRANSPOSED)
    if TRANSPOSED:
        total = tl.trans(total)
        total_up = tl.trans(total_up)
    if BIAS:
        total += tl.load(bias + column, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    if GATE:
        total = total * tl.sigmoid(total) * total_up
    ok = row_ok[:, None] & column_ok[None, :]
    at = row[:, None] * columns + column[None, :]
    if RESIDUAL:
        total += tl.load(residual + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=ok)
    if ARGMAX:
        masked = tl.where(ok, total, -float("inf"))
        value, place = tl.max(masked, axis=1, return_indices=True, return_indices_tie_break_left=True)
        blocks = tl.num_programs(0)
        tl.store(best_value + row * blocks + block, value, mask=row_ok)
        tl.store(best_index + row * blocks + block, clamped_index(place + block * COLUMNS, columns), mask=row_ok)


@triton.jit
def store_row(
    total, total_up, bias, residual, out, best_value, best_index, row, block, columns,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr, ARGMAX: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Finish the sums of some columns of one row: bias, gate, residual, store, argmax of the program."""
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    column_ok = column < columns
    if BIAS:
        total += tl.load(bias + column, mask=column_ok, other=0.0).to(tl.float32)
    if GATE:
        total = total * tl.sigmoid(total) * total_up
    if RESIDUAL:
        total += tl.load(residual + row * columns + column, mask=column_ok, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, total.to(out.dtype.element_ty), mask=column_ok)
    if ARGMAX:
        masked = tl.where(column_ok, total, -float("inf"))
        value, place = tl.max(masked, axis=0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(best_value + row * tl.num_programs(0) + block, value)
        tl.store(best_index + row * tl.num_programs(0) + block, clamped_index(place + block * COLUMNS, columns))


@triton.jit
def vector_kernel(
    x, norm, weight, bias, residual, out, best_value, best_index, columns, in_features, eps,
    USE_PDL: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr,
    ARGMAX: tl.constexpr, COLUMNS: tl.constexpr, IN_FEATURES: tl.constexpr,
):
    """project_kernel for a small matrix and a row or two: a program loads its rows of the matrix whole, at once.

    No loop and no tensor cores, so the kernel waits for memory only once. The norm before the product is included.
    """
    block = tl.program_id(0)
    row = tl.program_id(1)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, IN_FEATURES)
    column_ok = column < columns
    inside = step < in_features
    ok = column_ok[:, None] & inside[None, :]
    at = column[:, None].to(tl.int64) * in_features + step[None, :]
    weights = tl.load(weight + at, mask=ok, other=0.0)
    if GATE:
        up_weights = tl.load(weight + tl.cast(columns, tl.int64) * in_features + at, mask=ok, other=0.0)
    gain = tl.load(norm + step, mask=inside & NORM, other=0.0).to(tl.float32)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    part = tl.load(x + row * in_features + step, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(part * part, axis=0) / in_features + eps)
        part = part * scale * gain
    total = tl.sum(weights.to(tl.float32) * part[None, :], axis=1)
    total_up = tl.sum(up_weights.to(tl.float32) * part[None, :], axis=1) if GATE else total
    store_row(
        total, total_up, bias, residual, out, best_value, best_index, row, block, columns,
        BIAS, RESIDUAL, GATE, ARGMAX, COLUMNS,
    )


@triton.jit
def argmax_kernel(
    best_value, best_index, out, embedding, hidden_states, blocks, hidden_size,
    USE_PDL: tl.constexpr, EMBED: tl.constexpr, BLOCKS: tl.constexpr, HIDDEN_SIZE: tl.constexpr,
):
    """One program a row: the argmax over all blocks and, with EMBED, its input vector for the next step."""
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    values = tl.load(best_value + row * blocks + block, mask=block < blocks, other=-float("inf"))
    _, place = tl.max(values, axis=0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(best_index + row * blocks + clamped_index(place, blocks))
    tl.store(out + row, token.to(tl.int64))
    if EMBED:
        column = tl.arange(0, HIDDEN_SIZE)
        vector = tl.load(embedding + token.to(tl.int64) * hidden_size + column, mask=column < hidden_size, other=0.0)
        tl.store(hidden_states + row * hidden_size + column, vector, mask=column < hidden_size)
