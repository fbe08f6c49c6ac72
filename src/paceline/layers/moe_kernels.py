"""Triton kernels of a mixture of experts for passes over a few tokens. The eager reference is in layers/moe.py.

Roofline: such a pass is bound by reading the weights of the experts that its rows have chosen. One layer of a model of
30B weights with 3B active ones (hidden 2048, 128 experts of 768, 8 chosen) reads 8 · 3 · 768 · 2048 · 2 B = 75 MB for
one row: 17.6 µs at 4.3 TB/s. Six rows with choices of their own read 41 experts (90 µs), sixteen read 82 (180 µs). So
each expert is read once for all of its rows, and four small launches do everything: choose and group, gate and up with
the activation, down, weighted sum with the residual.

A pair is a row and one of its experts: row · top_k + choice. A tile is up to ROWS pairs with the same expert. Tiles
are read in the order of experts, rows of a tile never mix, and a row's experts are added in the order of its choices.
So a row's numbers are the same bits whether it is read alone, among draft tokens or among other sequences.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.layers.gemm_kernels import accumulate

# USE_PDL: see layers/gemm_kernels.py. Whatever was written two kernels ago is complete when a kernel starts, so the
# product of `down` reads its tiles and its first weights before it waits.


@triton.jit
def route_kernel(
    logits, counts, experts, weights, tile_expert, tile_pairs, rows, num_experts, tiles, scale,
    USE_PDL: tl.constexpr, RENORMALIZE: tl.constexpr, PADDED: tl.constexpr, NODES: tl.constexpr, TOP_K: tl.constexpr,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, TILES: tl.constexpr,
):
    """The experts of ROWS rows and their weights, by pair. TILES: also the tiles, where one program has all rows.

    PADDED: of the NODES nodes of a sequence only the first `counts` are real. Others choose nothing: expert
    `num_experts`, weight 0. Equal logits go to the first expert.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, EXPERTS)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    row_ok = row < rows
    if PADDED:
        row_ok = row_ok & (row % NODES < tl.load(counts + row // NODES, mask=row_ok, other=0))
    ok = row_ok[:, None] & (expert < num_experts)[None, :]
    scores = tl.load(logits + row[:, None] * num_experts + expert[None, :], mask=ok, other=-float("inf"))
    scores = scores.to(tl.float32)
    shares = tl.exp(scores - tl.where(row_ok, tl.max(scores, axis=1), 0.0)[:, None])
    pair = tl.full((ROWS, EXPERTS), -1, dtype=tl.int32)
    for choice in tl.static_range(TOP_K):
        _, best = tl.max(scores, axis=1, return_indices=True, return_indices_tie_break_left=True)
        chosen = (expert[None, :] == best[:, None]) & ok
        pair = tl.where(chosen, (row * TOP_K + choice)[:, None], pair)
        scores = tl.where(chosen, -float("inf"), scores)
        if PADDED:
            empty = (row < rows) & (row_ok == 0)
            tl.store(experts + row * TOP_K + choice, tl.zeros((ROWS,), tl.int32) + num_experts, mask=empty)
            tl.store(weights + row * TOP_K + choice, tl.zeros((ROWS,), tl.float32), mask=empty)
    if RENORMALIZE:
        total = tl.sum(tl.where(pair >= 0, shares, 0.0), axis=1)
    else:
        total = tl.sum(shares, axis=1)
    shares = shares / tl.where(row_ok, total, 1.0)[:, None] * scale
    tl.store(weights + pair, shares, mask=pair >= 0)
    tl.store(experts + pair, tl.zeros((ROWS, EXPERTS), tl.int32) + expert[None, :], mask=pair >= 0)
    if TILES > 0:
        active = tl.max(pair, axis=0) >= 0
        place = tl.cumsum(active.to(tl.int32), axis=0) - 1
        tile = tl.arange(0, TILES)
        tl.store(tile_expert + place, expert, mask=active)
        unused = (tile >= tl.sum(active.to(tl.int32), axis=0)) & (tile < tiles)
        tl.store(tile_expert + tile, tl.full((TILES,), -1, dtype=tl.int32), mask=unused)
        at = place[None, :] * ROWS + tl.arange(0, ROWS)[:, None]
        tl.store(tile_pairs + at, pair, mask=(pair >= -1) & active[None, :])


@triton.jit
def _float4(code, factor):
    """Codes of e2m1 as float32, times a factor: as bits of a float32 their exponent is 126 too small."""
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37 * factor


@triton.jit
def _expert_weights(
    weight, exponents, row, start, in_features, row_ok,
    DTYPE: tl.constexpr, MXFP4: tl.constexpr, EVEN: tl.constexpr, STEP: tl.constexpr,
):
    """Some rows of the stacked matrices, [rows, STEP] from column `start`.

    MXFP4: every byte is two columns; an exponent is loaded with each byte that it belongs to, from the cache, so that
    numbers are made where the bytes are and no thread has to ask another one.
    """
    if MXFP4:
        byte = start // 2 + tl.arange(0, STEP // 2)
        ok = row_ok[:, None] if EVEN else row_ok[:, None] & (byte < in_features // 2)[None, :]
        both = tl.load(weight + row[:, None] * (in_features // 2) + byte[None, :], mask=ok, other=0).to(tl.int32)
        exponent_at = exponents + row[:, None] * (in_features // 32) + (byte // 16)[None, :]
        exponent = tl.load(exponent_at, mask=ok, other=0).to(tl.int32)
        factor = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
        return tl.interleave(_float4(both & 15, factor).to(DTYPE), _float4(both >> 4, factor).to(DTYPE))
    else:
        column = start + tl.arange(0, STEP)
        ok = row_ok[:, None] if EVEN else row_ok[:, None] & (column < in_features)[None, :]
        return tl.load(weight + row[:, None] * in_features + column[None, :], mask=ok, other=0.0)


@triton.jit
def expert_gate_up_kernel(
    x, weight, exponents, bias, tile_expert, tile_pairs, out, columns, in_features, alpha, limit,
    USE_PDL: tl.constexpr, BIAS: tl.constexpr, CLAMPED: tl.constexpr, MXFP4: tl.constexpr, EVEN: tl.constexpr,
    TRANSPOSED: tl.constexpr, TOP_K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):
    """out [pairs, columns] = activation(gate, up) of each pair's row and expert, for one tile and some columns.

    CLAMPED: gate · sigmoid(alpha · gate) · (up + 1) within `limit`, else silu(gate) · up.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tile = tl.program_id(1)
    step = tl.arange(0, STEP)
    column_ok = column < columns
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    pair = tl.load(tile_pairs + tile * ROWS + tl.arange(0, ROWS))
    row_ok = pair >= 0
    first_row = expert.to(tl.int64) * 2 * columns  # of the expert in the stacked matrices
    x_at = x + (pair // TOP_K)[:, None].to(tl.int64) * in_features + step[None, :]
    gate_row = first_row + column
    up_row = gate_row + columns
    dtype: tl.constexpr = x.dtype.element_ty
    gate = tl.zeros((COLUMNS, ROWS) if TRANSPOSED else (ROWS, COLUMNS), dtype=tl.float32)
    up = tl.zeros((COLUMNS, ROWS) if TRANSPOSED else (ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, in_features, STEP):
        x_ok = row_ok[:, None] if EVEN else row_ok[:, None] & (start + step < in_features)[None, :]
        gate_weights = _expert_weights(
            weight, exponents, gate_row, start, in_features, column_ok, dtype, MXFP4, EVEN, STEP
        )
        up_weights = _expert_weights(weight, exponents, up_row, start, in_features, column_ok, dtype, MXFP4, EVEN, STEP)
        part = tl.load(x_at + start, mask=x_ok, other=0.0)
        gate = accumulate(part, gate_weights, gate, TRANSPOSED)
        up = accumulate(part, up_weights, up, TRANSPOSED)
    if TRANSPOSED:
        gate = tl.trans(gate)
        up = tl.trans(up)
    if BIAS:
        gate += tl.load(bias + first_row + column, mask=column_ok, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias + first_row + columns + column, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        activated = gate * tl.sigmoid(alpha * gate) * (up + 1.0)
    else:
        activated = gate * tl.sigmoid(gate) * up
    at = pair[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(out + at, activated.to(out.dtype.element_ty), mask=row_ok[:, None] & column_ok[None, :])


@triton.jit
def expert_down_kernel(
    activated, weight, exponents, bias, tile_expert, tile_pairs, out, columns, in_features,
    USE_PDL: tl.constexpr, BIAS: tl.constexpr, MXFP4: tl.constexpr, EVEN: tl.constexpr, TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):
    """out [pairs, columns], float32 = activated [pairs, in_features] · each pair's expert, for a tile and some columns.

    Weights do not depend on the product before, and the tiles are older still: the first weights come while it ends.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tile = tl.program_id(1)
    step = tl.arange(0, STEP)
    expert = tl.load(tile_expert + tile)
    column_ok = column < tl.where(expert >= 0, columns, 0)
    pair = tl.load(tile_pairs + tile * ROWS + tl.arange(0, ROWS))
    row_ok = pair >= 0
    first_row = tl.maximum(expert, 0).to(tl.int64) * columns
    weight_row = first_row + column
    dtype: tl.constexpr = activated.dtype.element_ty
    weights = _expert_weights(weight, exponents, weight_row, 0, in_features, column_ok, dtype, MXFP4, False, STEP)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    if expert < 0:
        return
    part_at = activated + pair[:, None].to(tl.int64) * in_features + step[None, :]
    part = tl.load(part_at, mask=row_ok[:, None] & (step < in_features)[None, :], other=0.0)
    total = tl.zeros((COLUMNS, ROWS) if TRANSPOSED else (ROWS, COLUMNS), dtype=tl.float32)
    total = accumulate(part, weights, total, TRANSPOSED)
    for start in range(STEP, in_features, STEP):
        part_ok = row_ok[:, None] if EVEN else row_ok[:, None] & (start + step < in_features)[None, :]
        weights = _expert_weights(
            weight, exponents, weight_row, start, in_features, column_ok, dtype, MXFP4, EVEN, STEP
        )
        part = tl.load(part_at + start, mask=part_ok, other=0.0)
        total = accumulate(part, weights, total, TRANSPOSED)
    if TRANSPOSED:
        total = tl.trans(total)
    if BIAS:
        total += tl.load(bias + first_row + column, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    at = pair[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(out + at, total, mask=row_ok[:, None] & column_ok[None, :])


@triton.jit
def weighted_sum_kernel(
    parts, weights, residual, out, columns,
    USE_PDL: tl.constexpr, RESIDUAL: tl.constexpr, TOP_K: tl.constexpr, COLUMNS: tl.constexpr,
):
    """out [rows, columns] = residual + the weighted parts of a row, choice after choice. Weight 0: no part."""
    row = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    ok = column < columns
    at = row.to(tl.int64) * columns + column
    added = tl.load(residual + at, mask=ok & RESIDUAL, other=0.0).to(tl.float32)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = row * TOP_K + choice
        share = tl.load(weights + pair)
        counted = column < tl.where(share != 0.0, columns, 0)
        part = tl.load(parts + pair.to(tl.int64) * columns + column, mask=counted, other=0.0)
        total += share * part
    tl.store(out + at, (added + total).to(out.dtype.element_ty), mask=ok)
