"""Triton kernel of attention over a paged cache: a few nodes for each of any number of sequences.

Sums run by chunks of context whose edges depend only on absolute positions. So a token's numbers are the same bits
whether it is read alone, among draft tokens or among other sequences. The eager reference is in layers/attention.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

CHUNK = 128  # tokens of context that are summed by themselves

# USE_PDL (programmatic dependent launch): a kernel starts while the kernel ahead of it is still running, loads what
# does not depend on it (its weights), then waits. It lets its own successor start only after that wait, so at most two
# kernels run at a time, and whatever was written two kernels ago is complete.


@triton.jit
def _rotated(base, at_low, ok, cos, sin, norm, eps, HALF: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr):
    """The two halves of a head's vectors [rows, HALF], normed with NORM, rotated by position with ROPE."""
    low = tl.load(base + at_low, mask=ok, other=0.0).to(tl.float32)
    high = tl.load(base + at_low + HALF, mask=ok, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / (2 * HALF) + eps)
        half = tl.arange(0, HALF)
        low = low * scale[:, None] * tl.load(norm + half).to(tl.float32)[None, :]
        high = high * scale[:, None] * tl.load(norm + HALF + half).to(tl.float32)[None, :]
    if ROPE:
        turned = low * cos - high * sin
        high = high * cos + low * sin
        low = turned
    return low, high


@triton.jit
def _rounded(numbers):
    """Numbers as the bytes of e4m3, to the nearest, ties to even: the same bits as layers/kv_rounding.py."""
    size = tl.minimum(tl.abs(numbers.to(tl.float32)), 448.0)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # three bits of mantissa, the exponent less by 120
    small = (size * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000  # below 2⁻⁶ steps are of 2⁻⁹
    code = tl.where(size < 0.015625, small, normal)
    return (code | ((numbers.to(tl.float32).to(tl.int32, bitcast=True) >> 24) & 128)).to(tl.uint8)


@triton.jit
def _cached(stored, DTYPE: tl.constexpr, ROUNDED: tl.constexpr):
    """Entries of the cache as numbers in the dtype of the products."""
    if ROUNDED:  # the exponent is 120 too small where the bits of the byte are those of a float32
        code = stored.to(tl.int32)
        bits = ((code & 128) << 24) | ((code & 127) << 20)
        return (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(DTYPE)
    else:
        return stored


@triton.jit(do_not_specialize=["max_chunks", "lanes"])  # a longer context is no reason to compile again
def attend_kernel(
    qkv, keys, values, rope_cache, query_rope_cache, query_norm, key_norm, sinks,
    out, partial, partial_stats, chunks_done,
    lengths, counts, depths, tree_mask, blocks, offset, table_width, layer_base, max_chunks, lanes, eps, scale, softcap,
    NODES: tl.constexpr, GROUP: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    NEW_TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr, CHUNK_TOKENS: tl.constexpr, QK_NORM: tl.constexpr,
    PARTS: tl.constexpr, USE_PDL: tl.constexpr, TRIGGER_DEPENDENTS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ROPE: tl.constexpr, ROUNDED: tl.constexpr,
    TREES: tl.constexpr,
):
    """Attention of some of a sequence's nodes, for one key head and every `lanes`-th chunk of its tokens.

    A row is a (node, query head of the group) pair. Their number is fixed for a model, and a wider pass has more PARTS:
    sums over a row are laid out by the tile, so a tile that grew with the pass would change a row's last bits. Rows are
    few and tokens many, so tokens take the long side of both products: [tokens, rows], then [head_dim, rows]. Every
    program that reads new keys rotates and stores them, then reads them back like all others, so that a token is
    treated alike whether it is new or old. `tree_mask` has a bit for each node of the pass that a node may see. Its
    first nodes are a chain; with TREES those off it have programs of their own for the chunks that hold nodes, which
    read keys and values where they will be once the branch is accepted: or the last bits of its sums would be others
    than those of the same tokens in a chain. They change what is read and nothing about how it is summed. Every
    chunk is summed by itself, and the last program to finish joins the chunks in order: the number of lanes changes
    nothing about the sums. With a WINDOW chunks before the first node's are left out: to other nodes they add zeros.
    A sink is a further score of its query head, in the sum of the weights and without a value.
    """
    nodes_per_part: tl.constexpr = ROWS // GROUP  # nodes of one part
    programs: tl.constexpr = PARTS + NODES if TREES else PARTS  # of a sequence, a key head and a lane
    seq = tl.program_id(0) // programs
    part = tl.program_id(0) % programs
    head = tl.program_id(1)
    lane = tl.program_id(2)
    count = tl.load(counts + seq)
    if TREES:
        is_branch = part >= PARTS  # this program is that of one node
        own = tl.maximum(part - PARTS, 0)
        own_mask = tl.load(tree_mask + seq * NODES + own)
        part = tl.where(is_branch, own // nodes_per_part, part)
    length = tl.load(lengths + seq) + offset
    end = length + count
    if WINDOW > 0:
        first_chunk = tl.maximum(length + 1 - WINDOW, 0) // CHUNK_TOKENS
    else:
        first_chunk = 0
    # No more than there is room for sums: a graph that drafts past what was asked for has further tokens to drop.
    chunks = tl.minimum((end + CHUNK_TOKENS - 1) // CHUNK_TOKENS - first_chunk, max_chunks)
    begin = lane
    step = lanes
    works = (lane < chunks) & (part * nodes_per_part < count)
    if TREES:
        first_with_nodes = length // CHUNK_TOKENS - first_chunk
        begin = tl.where(is_branch, first_with_nodes, lane)
        step = tl.where(is_branch, 1, lanes)
        is_off_chain = (own < count) & (own_mask != (tl.full((), 2, tl.int64) << own) - 1)
        works = works & ((lane == 0) & is_off_chain | (is_branch == 0))
    heads = GROUP * NUM_KV_HEADS
    size: tl.constexpr = 2 * HALF
    half = tl.arange(0, HALF)
    dim = tl.arange(0, size)
    row = tl.arange(0, ROWS)
    node = part * nodes_per_part + row // GROUP
    row_ok = (node < count) & (row < nodes_per_part * GROUP)
    out_at = ((seq * NODES + node) * heads * size + (head * GROUP + row % GROUP) * size)[None, :] + dim[:, None]
    if works:
        row_stride = (heads + 2 * NUM_KV_HEADS) * size  # of qkv, one node
        cache_base = layer_base + head * size  # + slot · NUM_KV_HEADS · size
        own_chunks = (chunks - 1 - begin) // step + 1  # chunks this program reads

        # --- what does not depend on this pass's products
        node_mask = tl.load(tree_mask + seq * NODES + node, mask=row_ok, other=0)
        if NODES <= 31:
            node_mask = node_mask.to(tl.int32)
        position = length + tl.load(depths + seq * NODES + node, mask=row_ok, other=0)
        row_cos = tl.load(query_rope_cache + position[:, None] * size + half[None, :], mask=row_ok[:, None], other=0.0)
        sin_at = position[:, None] * size + HALF + half[None, :]
        row_sin = tl.load(query_rope_cache + sin_at, mask=row_ok[:, None], other=0.0)
        new_node = tl.arange(0, NEW_TOKENS)
        new_ok = new_node < count
        place = length + new_node
        block = tl.load(blocks + seq * table_width + place // BLOCK_SIZE, mask=new_ok, other=0)
        new_position = length + tl.load(depths + seq * NODES + new_node, mask=new_ok, other=0)
        cos = tl.load(rope_cache + new_position[:, None] * size + half[None, :], mask=new_ok[:, None], other=0.0)
        sin = tl.load(rope_cache + new_position[:, None] * size + HALF + half[None, :], mask=new_ok[:, None], other=0.0)
        if USE_PDL:
            gdc_wait()
            if TRIGGER_DEPENDENTS:
                gdc_launch_dependents()

        # --- queries
        dtype: tl.constexpr = qkv.dtype.element_ty if ROUNDED else keys.dtype.element_ty
        at_low = ((seq * NODES + node) * row_stride + (head * GROUP + row % GROUP) * size)[:, None] + half[None, :]
        low, high = _rotated(qkv, at_low, row_ok[:, None], row_cos, row_sin, query_norm, eps, HALF, QK_NORM, ROPE)
        q_low = tl.trans(low.to(dtype))
        q_high = tl.trans(high.to(dtype))

        # --- new keys and values
        if (first_chunk + begin + (own_chunks - 1) * step + 1) * CHUNK_TOKENS > length:
            node_at = (seq * NODES + new_node) * row_stride
            key_at = node_at[:, None] + (heads + head) * size + half[None, :]
            key_low, key_high = _rotated(qkv, key_at, new_ok[:, None], cos, sin, key_norm, eps, HALF, QK_NORM, ROPE)
            cache_at = cache_base + (block.to(tl.int64) * BLOCK_SIZE + place % BLOCK_SIZE) * (NUM_KV_HEADS * size)
            cache_at = cache_at[:, None]
            new_low = key_low.to(dtype)
            new_high = key_high.to(dtype)
            if ROUNDED:
                new_low = _rounded(new_low)
                new_high = _rounded(new_high)
            tl.store(keys + cache_at + half[None, :], new_low, mask=new_ok[:, None])
            tl.store(keys + cache_at + HALF + half[None, :], new_high, mask=new_ok[:, None])
            value_at = node_at[:, None] + (heads + NUM_KV_HEADS + head) * size + dim[None, :]
            new_values = tl.load(qkv + value_at, mask=new_ok[:, None], other=0.0)
            if ROUNDED:
                new_values = _rounded(new_values)
            tl.store(values + cache_at + dim[None, :], new_values, mask=new_ok[:, None])
            tl.debug_barrier()

        # --- attention, chunk by chunk
        head_index = (seq * PARTS + part) * NUM_KV_HEADS + head
        all_chunks = chunks  # that programs read of this part
        sink = tl.zeros((ROWS,), dtype=tl.float32)
        if SINKS:
            sink = tl.load(sinks + head * GROUP + row % GROUP).to(tl.float32)
        if TREES:
            off_chain = row_ok & (node_mask != (tl.full((ROWS,), 2, node_mask.dtype) << node.to(node_mask.dtype)) - 1)
            num_off_chain = tl.sum((off_chain & (row % GROUP == 0)).to(tl.int32), axis=0)
            all_chunks = chunks + num_off_chain * (chunks - first_with_nodes)
            sees = ((own_mask >> new_node) & 1).to(tl.int32)
            rank = tl.cumsum(sees, axis=0) - sees  # on the branch of the node
            own_end = length + tl.sum(sees, axis=0)
        for chunk in range(begin, chunks, step):
            token = (first_chunk + chunk) * CHUNK_TOKENS + tl.arange(0, CHUNK_TOKENS)
            token_ok = (token < end)[:, None]
            pass_offset = (token - length).to(node_mask.dtype)[:, None]
            bit = (node_mask[None, :] >> tl.maximum(pass_offset, 0)) & 1
            visible = (pass_offset < 0) | ((bit == 1) & token_ok)
            if WINDOW > 0:
                in_pass = (token >= length) & (token < end)
                depth = tl.load(depths + seq * NODES + token - length, mask=in_pass, other=0)
                token_position = tl.where(in_pass, length + depth, token)
                visible = visible & (position[None, :] - token_position[:, None] < WINDOW)
            source = token
            loaded = token < end
            stored = row_ok
            if TREES:
                has_nodes = (first_chunk + chunk + 1) * CHUNK_TOKENS > length
                at_place = (rank[None, :] == (token - length)[:, None]) & (sees[None, :] == 1)
                branch_node = tl.sum(tl.where(at_place, new_node[None, :], 0), axis=1)
                on_branch = (token < own_end)[:, None]
                if WINDOW > 0:
                    on_branch = on_branch & (position[None, :] - token[:, None] < WINDOW)
                source = tl.where(is_branch & (token >= length), length + branch_node, token)
                loaded = tl.where(is_branch, token < own_end, loaded)
                visible = tl.where(is_branch, on_branch, visible)
                stored = row_ok & tl.where(is_branch, node == own, (off_chain & has_nodes) == 0)
            row_max, row_sum, weighted = _chunk_sums(
                keys, values, cache_base, blocks + seq * table_width, source, loaded, visible, q_low, q_high,
                scale, softcap, NUM_KV_HEADS, HALF, BLOCK_SIZE, SOFTCAP, ROUNDED, dtype,
            )
            if chunks == 1:
                total = row_sum
                if SINKS:
                    total = row_sum + tl.exp(sink - row_max)
                if WINDOW > 0:
                    total = tl.where(row_ok, total, 1.0)  # a row of padding may see nothing
                tl.store(out + out_at, (weighted / total[None, :]).to(out.dtype.element_ty), mask=stored[None, :])
            else:
                stats_at = (head_index * max_chunks + chunk) * ROWS * 2 + row
                tl.store(partial_stats + stats_at, row_max, mask=stored)
                tl.store(partial_stats + stats_at + ROWS, row_sum, mask=stored)
                part_at = (head_index * max_chunks + chunk) * ROWS * size + dim[:, None] * ROWS + row[None, :]
                tl.store(partial + part_at, weighted, mask=stored[None, :])
        if chunks > 1:
            tl.debug_barrier()
            done_before = tl.atomic_add(chunks_done + head_index, own_chunks.to(tl.int32), sem="acq_rel")
            if done_before + own_chunks == all_chunks:
                first = head_index * max_chunks
                _join_chunks(partial, partial_stats, out, first, chunks, out_at, row_ok, sink, ROWS, HALF, SINKS)
                tl.store(chunks_done + head_index, 0)
    pads = lane == 0
    if TREES:
        pads = pads & (is_branch == 0)
    if pads:  # padding: no kernel reads it, but it must not hold NaNs left in memory
        if USE_PDL:
            gdc_wait()
        empty = (node >= count) & (node < NODES) & (row < nodes_per_part * GROUP)
        tl.store(out + out_at, tl.zeros((size, ROWS), dtype=out.dtype.element_ty), mask=empty[None, :])


@triton.jit
def _chunk_sums(
    keys, values, cache_base, blocks, token, token_ok, visible, q_low, q_high, scale, softcap,
    NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr, SOFTCAP: tl.constexpr,
    ROUNDED: tl.constexpr, DTYPE: tl.constexpr,
):
    """Of one chunk: the largest score of every row, the sum of its weights, and the weighted values.

    token: where the keys are, by the places in which they are summed. blocks: of the sequence.
    """
    size: tl.constexpr = 2 * HALF
    half = tl.arange(0, HALF)
    dim = tl.arange(0, size)
    loaded = token_ok[:, None]
    token_block = tl.load(blocks + token // BLOCK_SIZE, mask=token_ok, other=0)
    at = cache_base + (token_block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE) * (NUM_KV_HEADS * size)
    at = at[:, None]
    k_low = _cached(tl.load(keys + at + half[None, :], mask=loaded, other=0), DTYPE, ROUNDED)
    k_high = _cached(tl.load(keys + at + HALF + half[None, :], mask=loaded, other=0), DTYPE, ROUNDED)
    # loads while scores are computed
    value = _cached(tl.load(values + at + dim[None, :], mask=loaded, other=0), DTYPE, ROUNDED)
    score = tl.dot(k_low, q_low, input_precision="ieee")
    score = tl.dot(k_high, q_high, score, input_precision="ieee") * scale
    if SOFTCAP:
        score = softcap - 2 * softcap / (tl.exp(score * (2 / softcap)) + 1)  # softcap * tanh(score / softcap)
    score = tl.where(visible, score, -float("inf"))
    row_max = tl.max(score, axis=0)
    probs = tl.exp(score - tl.where(row_max == -float("inf"), 0.0, row_max)[None, :])
    weighted = tl.dot(tl.trans(value), probs.to(DTYPE), input_precision="ieee")
    return row_max, tl.sum(probs, axis=0), weighted


@triton.jit
def _join_chunks(
    partial, partial_stats, out, first, chunks, out_at, row_ok, sink,
    ROWS: tl.constexpr, HALF: tl.constexpr, SINKS: tl.constexpr,
):
    """Join the chunks of one sequence and head, first to last: the same order every time."""
    size: tl.constexpr = 2 * HALF
    row = tl.arange(0, ROWS)
    dim = tl.arange(0, size)
    row_max = tl.full((ROWS,), -float("inf"), dtype=tl.float32)
    for chunk in range(0, chunks):
        stats_at = (first + chunk) * ROWS * 2 + row
        row_max = tl.maximum(row_max, tl.load(partial_stats + stats_at, mask=row_ok, other=0.0, cache_modifier=".cg"))
    row_sum = tl.zeros((ROWS,), dtype=tl.float32)
    weighted = tl.zeros((size, ROWS), dtype=tl.float32)
    for chunk in range(0, chunks):
        stats_at = (first + chunk) * ROWS * 2 + row
        rescale = tl.exp(tl.load(partial_stats + stats_at, mask=row_ok, other=0.0, cache_modifier=".cg") - row_max)
        row_sum += tl.load(partial_stats + stats_at + ROWS, mask=row_ok, other=1.0, cache_modifier=".cg") * rescale
        part_at = (first + chunk) * ROWS * size + dim[:, None] * ROWS + row[None, :]
        weighted += tl.load(partial + part_at, mask=row_ok[None, :], other=0.0, cache_modifier=".cg") * rescale[None, :]
    if SINKS:
        row_sum += tl.exp(sink - row_max)
    tl.store(out + out_at, (weighted / row_sum[None, :]).to(out.dtype.element_ty), mask=row_ok[None, :])
