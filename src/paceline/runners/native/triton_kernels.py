"""Triton kernels of a narrow pass: few tokens a product, any number of sequences in attention.

A pass over a few tokens is bound by reading the weights, so each kernel reads its weights once, in long rows, and does
everything else on the side: the gate inside a product, the residual after it, the argmax of the head. Rows of a pass
never mix, and sums run in an order that depends only on absolute positions: in attention by chunks of context, in a
product from the first column to the last, whatever the tile. So a token's numbers are the same bits whether it is read
alone, among draft tokens or among other sequences.

Every kernel has a plain twin in plain.py; tests/runners/native hold them together, on a CPU through Triton's
interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# EARLY: a kernel starts while the one before it is still running, fetches what does not depend on it (its weights),
# then waits. It lets its own successor start only after that wait, so two kernels at most are under way at once, and
# whatever was written two kernels ago is there.

CHUNK = 128  # tokens of context that `attend_kernel` sums up by themselves


@triton.jit
def norm_kernel(x, weight, out, width, eps, EARLY: tl.constexpr, WIDTH: tl.constexpr):
    """One program a row: root-mean-square norm, rounded as transformers steps it."""
    row = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    ok = column < width
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    wide = tl.load(x + row * width + column, mask=ok, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    gain = tl.load(weight + column, mask=ok, other=0.0)
    kind = out.dtype.element_ty
    tl.store(out + row * width + column, (wide * scale).to(kind) * gain, mask=ok)


@triton.jit
def gate_kernel(both, out, inner, BLOCK_COLUMNS: tl.constexpr):
    """silu(gate) * up, where `both` holds gate and up of a row side by side."""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    ok = column < inner
    gate = tl.load(both + row * 2 * inner + column, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * inner + inner + column, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * inner + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=ok)


@triton.jit
def _within(place, count):
    """A place among `count`. Rows that hold no sequence hold garbage, and the argmax of NaNs may lie anywhere."""
    return tl.minimum(tl.maximum(place, 0), count - 1)


@triton.jit
def _summed(part, weights, total, TALL: tl.constexpr):
    """total + part · weightsᵀ; TALL: + weights · partᵀ. Each sum runs over the columns in order, either way."""
    if TALL:
        return tl.dot(weights, tl.trans(part), total, input_precision="ieee")
    else:
        return tl.dot(part, tl.trans(weights), total, input_precision="ieee")


@triton.jit
def project_kernel(
    x, weight, bias, residual, out, best_value, best_index, rows, columns, inner,
    EARLY: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr, BEST: tl.constexpr,
    EVEN: tl.constexpr, TALL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):
    """out [rows, columns] = x · weightᵀ, plus bias, plus residual; or silu(gate) * up; or with the best column found.

    GATE: weight holds gate and up, [2 · columns, inner]. BEST: each program also leaves its best column and its value.
    TALL: the tile stands on its side while it is summed, which suits more than 16 rows.
    """
    block = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, STEP)
    row_ok = row < rows
    column_ok = column < columns
    total = tl.zeros((COLUMNS, ROWS) if TALL else (ROWS, COLUMNS), dtype=tl.float32)
    total_up = tl.zeros((COLUMNS, ROWS) if TALL else (ROWS, COLUMNS), dtype=tl.float32)
    x_at = x + row[:, None] * inner + step[None, :]
    weight_at = weight + column[:, None].to(tl.int64) * inner + step[None, :]
    up_at = weight_at + columns.to(tl.int64) * inner
    # The first tile of the weights does not depend on the kernel before: fetch it while that one finishes.
    inside = (step < inner)[None, :]
    weights = tl.load(weight_at, mask=column_ok[:, None] & inside, other=0.0)
    if GATE:
        ups = tl.load(up_at, mask=column_ok[:, None] & inside, other=0.0)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    part = tl.load(x_at, mask=row_ok[:, None] & inside, other=0.0)
    total = _summed(part, weights, total, TALL)
    if GATE:
        total_up = _summed(part, ups, total_up, TALL)
    for start in range(STEP, inner, STEP):
        inside = (start + step < inner)[None, :]
        x_ok = row_ok[:, None] if EVEN else row_ok[:, None] & inside
        w_ok = column_ok[:, None] if EVEN else column_ok[:, None] & inside
        part = tl.load(x_at + start, mask=x_ok, other=0.0)
        weights = tl.load(weight_at + start, mask=w_ok, other=0.0)
        total = _summed(part, weights, total, TALL)
        if GATE:
            ups = tl.load(up_at + start, mask=w_ok, other=0.0)
            total_up = _summed(part, ups, total_up, TALL)
    if TALL:
        total = tl.trans(total)
        total_up = tl.trans(total_up)
    if BIAS:
        total += tl.load(bias + column, mask=column_ok, other=0.0).to(tl.float32)[None, :]
    if GATE:
        total = total * tl.sigmoid(total) * total_up
    ok = row_ok[:, None] & column_ok[None, :]
    at = row[:, None] * columns + column[None, :]
    if ADD:
        total += tl.load(residual + at, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=ok)
    if BEST:
        shown = tl.where(ok, total, -float("inf"))
        value, place = tl.max(shown, axis=1, return_indices=True, return_indices_tie_break_left=True)
        blocks = tl.num_programs(0)
        tl.store(best_value + row * blocks + block, value, mask=row_ok)
        tl.store(best_index + row * blocks + block, _within(place + block * COLUMNS, columns), mask=row_ok)


@triton.jit
def _leave_row(
    total, total_up, bias, residual, out, best_value, best_index, row, block, columns,
    BIAS: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr, BEST: tl.constexpr, COLUMNS: tl.constexpr,
):
    """What a program does with the sums of some columns of one row: bias, gate, residual, storing, its best."""
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    column_ok = column < columns
    if BIAS:
        total += tl.load(bias + column, mask=column_ok, other=0.0).to(tl.float32)
    if GATE:
        total = total * tl.sigmoid(total) * total_up
    if ADD:
        total += tl.load(residual + row * columns + column, mask=column_ok, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, total.to(out.dtype.element_ty), mask=column_ok)
    if BEST:
        shown = tl.where(column_ok, total, -float("inf"))
        value, place = tl.max(shown, axis=0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(best_value + row * tl.num_programs(0) + block, value)
        tl.store(best_index + row * tl.num_programs(0) + block, _within(place + block * COLUMNS, columns))


@triton.jit
def vector_kernel(
    x, norm, weight, bias, residual, out, best_value, best_index, columns, inner, eps,
    EARLY: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr,
    BEST: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):
    """project_kernel for a small matrix and a row or two: a program takes its rows of the matrix whole, in one load.

    No loop and no tensor cores, so one trip to memory is all it waits for. The norm before the product is on board.
    """
    block = tl.program_id(0)
    row = tl.program_id(1)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, INNER)
    column_ok = column < columns
    inside = step < inner
    ok = column_ok[:, None] & inside[None, :]
    at = column[:, None].to(tl.int64) * inner + step[None, :]
    weights = tl.load(weight + at, mask=ok, other=0.0)
    if GATE:
        ups = tl.load(weight + columns.to(tl.int64) * inner + at, mask=ok, other=0.0)
    gain = tl.load(norm + step, mask=inside & NORM, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    part = tl.load(x + row * inner + step, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(part * part, axis=0) / inner + eps)
        part = part * scale * gain
    total = tl.sum(weights.to(tl.float32) * part[None, :], axis=1)
    total_up = tl.sum(ups.to(tl.float32) * part[None, :], axis=1) if GATE else total
    _leave_row(
        total, total_up, bias, residual, out, best_value, best_index, row, block, columns,
        BIAS, ADD, GATE, BEST, COLUMNS,
    )


@triton.jit
def _unpacked(weight, scale, row, place, ok, inner, groups, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Rows `row` of a matrix of few bits at columns `place`, as float32. [rows, columns]"""
    row = row[:, None].to(tl.int64)
    column = place[None, :]
    if BITS == 8:
        steps = tl.load(weight + row * inner + column, mask=ok, other=0).to(tl.float32)
    else:
        pair = tl.load(weight + row * (inner // 2) + column // 2, mask=ok, other=0).to(tl.int32)
        steps = (((pair >> (column % 2 * 4)) & 15) - 8).to(tl.float32)
    return steps * tl.load(scale + row * groups + column // GROUP, mask=ok, other=0.0)


@triton.jit
def packed_kernel(
    x, weight, scale, bias, residual, out, best_value, best_index, columns, inner, groups,
    EARLY: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, GATE: tl.constexpr, BEST: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):
    """project_kernel for a matrix of few bits: a program takes some of its rows and one row of x."""
    block = tl.program_id(0)
    row = tl.program_id(1)
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    column_ok = column < columns
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    total_up = tl.zeros((COLUMNS,), dtype=tl.float32)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    for start in range(0, inner, STEP):
        place = start + tl.arange(0, STEP)
        inside = place < inner
        ok = column_ok[:, None] & inside[None, :]
        part = tl.load(x + row * inner + place, mask=inside, other=0.0).to(tl.float32)[None, :]
        total += tl.sum(_unpacked(weight, scale, column, place, ok, inner, groups, BITS, GROUP) * part, axis=1)
        if GATE:
            ups = _unpacked(weight, scale, columns + column, place, ok, inner, groups, BITS, GROUP)
            total_up += tl.sum(ups * part, axis=1)
    _leave_row(
        total, total_up, bias, residual, out, best_value, best_index, row, block, columns,
        BIAS, ADD, GATE, BEST, COLUMNS,
    )


@triton.jit
def best_kernel(
    best_value, best_index, out, embedding, stream, blocks, width,
    EARLY: tl.constexpr, EMBED: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr,
):
    """One program a row: the best of all blocks' best, and with EMBED its input vector, ready for the next step."""
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    values = tl.load(best_value + row * blocks + block, mask=block < blocks, other=-float("inf"))
    _, place = tl.max(values, axis=0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(best_index + row * blocks + _within(place, blocks))
    tl.store(out + row, token.to(tl.int64))
    if EMBED:
        column = tl.arange(0, WIDTH)
        vector = tl.load(embedding + token.to(tl.int64) * width + column, mask=column < width, other=0.0)
        tl.store(stream + row * width + column, vector, mask=column < width)


@triton.jit
def _turned(base, at_low, ok, cos, sin, norm, eps, HALF: tl.constexpr, NORM: tl.constexpr):
    """The two halves of a head's vectors [rows, HALF], normed if the family does, turned by position."""
    low = tl.load(base + at_low, mask=ok, other=0.0).to(tl.float32)
    high = tl.load(base + at_low + HALF, mask=ok, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / (2 * HALF) + eps)
        half = tl.arange(0, HALF)
        low = low * scale[:, None] * tl.load(norm + half).to(tl.float32)[None, :]
        high = high * scale[:, None] * tl.load(norm + HALF + half).to(tl.float32)[None, :]
    return low * cos - high * sin, high * cos + low * sin


@triton.jit(do_not_specialize=["most_chunks", "lanes"])  # a longer context is no reason to compile again
def attend_kernel(
    qkv, keys, values, rope_cache, query_norm, key_norm, out, partial, partial_stats, arrived,
    lengths, counts, depths, tree_mask, blocks, offset, table_width, layer_base, most_chunks, lanes, eps, scale,
    NODES: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    FRESH: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHUNK_TOKENS: tl.constexpr, HEAD_NORM: tl.constexpr,
    PARTS: tl.constexpr, EARLY: tl.constexpr, HANDS_ON: tl.constexpr,
):
    """Attention of some of a sequence's nodes, for one key head and every `lanes`-th chunk of its tokens.

    A row is a (node, query head of the group) pair. Their number is fixed for a model, and a wider pass has more PARTS:
    sums over a row are laid out by the tile, so a tile that grew with the pass would change a row's last bits. Rows are
    few and tokens many, so tokens take the long side of both products: [tokens, rows], then [head size, rows]. New keys
    are turned and stored by every program that looks at them, then read back like all others, so that a token is
    treated alike whether it is new or old. `tree_mask` has a bit for each node of the pass that a node may see. Every
    chunk is summed by itself, and the last program to arrive puts the chunks together, in order: how many lanes there
    are changes nothing about the sums.
    """
    seq = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    head = tl.program_id(1)
    lane = tl.program_id(2)
    each: tl.constexpr = ROWS // GROUP  # nodes a part holds
    count = tl.load(counts + seq)
    length = tl.load(lengths + seq) + offset
    end = length + count
    chunks = (end + CHUNK_TOKENS - 1) // CHUNK_TOKENS
    heads = GROUP * KV_HEADS
    size: tl.constexpr = 2 * HALF
    half = tl.arange(0, HALF)
    whole = tl.arange(0, size)
    row = tl.arange(0, ROWS)
    node = part * each + row // GROUP
    row_ok = (node < count) & (row < each * GROUP)
    out_at = ((seq * NODES + node) * heads * size + (head * GROUP + row % GROUP) * size)[None, :] + whole[:, None]
    if (lane < chunks) & (part * each < count):
        line = (heads + 2 * KV_HEADS) * size  # of qkv, one node
        cache = layer_base + head * size  # + place · KV_HEADS · size
        mine = (chunks - 1 - lane) // lanes + 1  # chunks this program looks at

        # --- what does not depend on this pass's products
        sight = tl.load(tree_mask + seq * NODES + node, mask=row_ok, other=0)
        if NODES <= 31:
            sight = sight.to(tl.int32)
        position = length + tl.load(depths + seq * NODES + node, mask=row_ok, other=0)
        row_cos = tl.load(rope_cache + position[:, None] * size + half[None, :], mask=row_ok[:, None], other=0.0)
        row_sin = tl.load(rope_cache + position[:, None] * size + HALF + half[None, :], mask=row_ok[:, None], other=0.0)
        fresh = tl.arange(0, FRESH)
        fresh_ok = fresh < count
        place = length + fresh
        block = tl.load(blocks + seq * table_width + place // BLOCK_SIZE, mask=fresh_ok, other=0)
        turn = length + tl.load(depths + seq * NODES + fresh, mask=fresh_ok, other=0)
        cos = tl.load(rope_cache + turn[:, None] * size + half[None, :], mask=fresh_ok[:, None], other=0.0)
        sin = tl.load(rope_cache + turn[:, None] * size + HALF + half[None, :], mask=fresh_ok[:, None], other=0.0)
        if EARLY:
            gdc_wait()
            if HANDS_ON:
                gdc_launch_dependents()

        # --- queries
        kind = keys.dtype.element_ty
        at_low = ((seq * NODES + node) * line + (head * GROUP + row % GROUP) * size)[:, None] + half[None, :]
        low, high = _turned(qkv, at_low, row_ok[:, None], row_cos, row_sin, query_norm, eps, HALF, HEAD_NORM)
        q_low = tl.trans(low.to(kind))
        q_high = tl.trans(high.to(kind))

        # --- new keys and values
        if (lane + (mine - 1) * lanes + 1) * CHUNK_TOKENS > length:
            node_at = (seq * NODES + fresh) * line
            key_at = node_at[:, None] + (heads + head) * size + half[None, :]
            key_low, key_high = _turned(qkv, key_at, fresh_ok[:, None], cos, sin, key_norm, eps, HALF, HEAD_NORM)
            spot = (cache + (block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE) * (KV_HEADS * size))[:, None]
            tl.store(keys + spot + half[None, :], key_low.to(kind), mask=fresh_ok[:, None])
            tl.store(keys + spot + HALF + half[None, :], key_high.to(kind), mask=fresh_ok[:, None])
            value_at = node_at[:, None] + (heads + KV_HEADS + head) * size + whole[None, :]
            new = tl.load(qkv + value_at, mask=fresh_ok[:, None], other=0.0)
            tl.store(values + spot + whole[None, :], new, mask=fresh_ok[:, None])
            tl.debug_barrier()

        # --- look back, chunk by chunk
        column = tl.program_id(0) * KV_HEADS + head
        for chunk in range(lane, chunks, lanes):
            token = chunk * CHUNK_TOKENS + tl.arange(0, CHUNK_TOKENS)
            there = (token < end)[:, None]
            token_page = tl.load(blocks + seq * table_width + token // BLOCK_SIZE, mask=token < end, other=0)
            at = (cache + (token_page.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE) * (KV_HEADS * size))[:, None]
            k_low = tl.load(keys + at + half[None, :], mask=there, other=0.0)
            k_high = tl.load(keys + at + HALF + half[None, :], mask=there, other=0.0)
            value = tl.load(values + at + whole[None, :], mask=there, other=0.0)  # on its way while scores are made
            score = tl.dot(k_low, q_low, input_precision="ieee")
            score = tl.dot(k_high, q_high, score, input_precision="ieee") * scale
            ahead = (token - length).to(sight.dtype)[:, None]
            bit = (sight[None, :] >> tl.maximum(ahead, 0)) & 1
            visible = (ahead < 0) | ((bit == 1) & there)
            score = tl.where(visible, score, -float("inf"))
            top = tl.max(score, axis=0)
            uniforms = tl.exp(score - tl.where(top == -float("inf"), 0.0, top)[None, :])
            weight = tl.sum(uniforms, axis=0)
            seen = tl.dot(tl.trans(value), uniforms.to(kind), input_precision="ieee")
            if chunks == 1:
                tl.store(out + out_at, (seen / weight[None, :]).to(out.dtype.element_ty), mask=row_ok[None, :])
            else:
                stats_at = (column * most_chunks + chunk) * ROWS * 2 + row
                tl.store(partial_stats + stats_at, top, mask=row_ok)
                tl.store(partial_stats + stats_at + ROWS, weight, mask=row_ok)
                part_at = (column * most_chunks + chunk) * ROWS * size + whole[:, None] * ROWS + row[None, :]
                tl.store(partial + part_at, seen, mask=row_ok[None, :])
        if chunks > 1:
            tl.debug_barrier()
            before = tl.atomic_add(arrived + column, mine.to(tl.int32), sem="acq_rel")
            if before + mine == chunks:
                _join_chunks(partial, partial_stats, out, column * most_chunks, chunks, out_at, row_ok, ROWS, HALF)
                tl.store(arrived + column, 0)
    if lane == 0:  # padding: nothing reads it, but it must not hold NaNs that happen to lie in memory
        if EARLY:
            gdc_wait()
        empty = (node >= count) & (node < NODES) & (row < each * GROUP)
        tl.store(out + out_at, tl.zeros((size, ROWS), dtype=out.dtype.element_ty), mask=empty[None, :])


@triton.jit
def _join_chunks(
    partial, partial_stats, out, first, chunks, out_at, row_ok, ROWS: tl.constexpr, HALF: tl.constexpr
):
    """Put the chunks of one sequence and head together, first to last: the same order every time."""
    size: tl.constexpr = 2 * HALF
    row = tl.arange(0, ROWS)
    whole = tl.arange(0, size)
    top = tl.full((ROWS,), -float("inf"), dtype=tl.float32)
    for chunk in range(0, chunks):
        stats_at = (first + chunk) * ROWS * 2 + row
        top = tl.maximum(top, tl.load(partial_stats + stats_at, mask=row_ok, other=0.0, cache_modifier=".cg"))
    weight = tl.zeros((ROWS,), dtype=tl.float32)
    seen = tl.zeros((size, ROWS), dtype=tl.float32)
    for chunk in range(0, chunks):
        stats_at = (first + chunk) * ROWS * 2 + row
        fade = tl.exp(tl.load(partial_stats + stats_at, mask=row_ok, other=0.0, cache_modifier=".cg") - top)
        weight += tl.load(partial_stats + stats_at + ROWS, mask=row_ok, other=1.0, cache_modifier=".cg") * fade
        part_at = (first + chunk) * ROWS * size + whole[:, None] * ROWS + row[None, :]
        seen += tl.load(partial + part_at, mask=row_ok[None, :], other=0.0, cache_modifier=".cg") * fade[None, :]
    tl.store(out + out_at, (seen / weight[None, :]).to(out.dtype.element_ty), mask=row_ok[None, :])
