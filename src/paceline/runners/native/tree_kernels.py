"""What lies between the passes of steps in a row whose draft tokens are trees: as few small kernels as for chains."""

from __future__ import annotations

import triton.language as tl

from paceline.runners.native.step_kernels import unspecialized


@unspecialized
def put_tree(
    drafted,  # [sequences, …], and how far rows of it lie apart: so do those of parents
    parents,
    limits,
    token_ids,  # what the target reads: [sequences, nodes], as depths and tree_mask
    counts,
    depths,
    tree_mask,
    drafted_stride,
    nodes,
    k,
    BLOCK: tl.constexpr,
):
    """The first draft tokens of every tree into the inputs of the target. Node 0 is the last token of the sequence."""
    seq = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    made = tl.load(limits + seq)
    row, inside = seq * nodes, (place > 0) & (place <= made)
    at = seq * drafted_stride + place - 1
    tokens = tl.load(drafted + at, mask=inside, other=0)
    before = tl.load(parents + at, mask=inside, other=0)
    depth = tl.zeros([BLOCK], dtype=tl.int64)
    seen = tl.full([BLOCK], 1, tl.int64) << place.to(tl.int64)
    for node in range(1, k + 1):  # a parent comes before its children
        parent = tl.sum(tl.where(place == node, before, 0), axis=0)
        own_depth = tl.sum(tl.where(place == parent, depth, 0), axis=0) + 1
        own_seen = tl.sum(tl.where(place == parent, seen, 0), axis=0)
        depth = tl.where(place == node, own_depth, depth)
        seen = tl.where(place == node, seen | own_seen, seen)
    is_node = (place > 0) & (place <= k)
    tl.store(depths + row + place, depth, mask=is_node)
    tl.store(tree_mask + row + place, seen, mask=is_node)
    tl.store(token_ids + row + place, tokens, mask=is_node)
    tl.store(counts + seq, made + 1)


@unspecialized
def settle_tree(
    parents,
    limits,
    best,  # of the target, [sequences · nodes]
    token_ids,
    lengths,
    accepted,  # outputs: draft tokens, …
    grown,  # … tokens that the sequence grows by, its last two, the nodes of the path, and a row for the host
    last_tokens,
    order,
    result,
    drafted_stride,
    nodes,
    k,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Walk from the last token down the tree as long as a child is the target's argmax; let the inputs go on."""
    seq = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    made = tl.load(limits + seq)
    own = tl.load(best + seq * nodes + place, mask=place < nodes, other=-2)
    tokens = tl.load(token_ids + seq * nodes + place, mask=place < nodes, other=-1)
    inside = (place > 0) & (place <= made)
    before = tl.load(parents + seq * drafted_stride + place - 1, mask=inside, other=-1)
    here = made * 0  # the last accepted node
    count = made * 0
    path = place.to(tl.int64)
    for _ in range(0, k):  # a child that is not found is none, and has none
        argmax = tl.sum(tl.where(place == here, own, 0), axis=0)
        is_child = inside & (before == here) & (tokens == argmax)
        child = tl.max(tl.where(is_child, place, 0), axis=0).to(tl.int64)
        found = child > 0
        count += found.to(tl.int64)
        path = tl.where(found & (place == count), child, path)
        here = tl.where(found, child, here)
        inside = inside & found
    next_token = tl.sum(tl.where(place == here, own, 0), axis=0)
    last = tl.sum(tl.where(place == here, tokens, 0), axis=0)
    tl.store(lengths + seq, tl.load(lengths + seq) + count + 1)
    tl.store(accepted + seq, count)
    tl.store(grown + seq, count + 1)
    tl.store(last_tokens + seq * 2, last)
    tl.store(last_tokens + seq * 2 + 1, next_token)
    tl.store(order + seq * (k + 1) + place, path, mask=place <= k)
    row = result + seq * (FIELDS + 3 * k)
    tl.store(row, count)
    tl.store(row + 1, next_token)
    tl.store(row + 2, made)
    is_node = (place > 0) & (place <= k)
    tl.store(row + FIELDS + place - 1, tokens, mask=is_node)
    tl.store(row + FIELDS + k + place - 1, before, mask=is_node)
    tl.store(row + FIELDS + 2 * k + place - 1, path, mask=is_node)
    tl.debug_barrier()  # the last token was read from where the next one goes
    tl.store(token_ids + seq * nodes, next_token)


@unspecialized
def move_accepted(
    keys,  # [layers, tokens, size], and how far layers lie apart
    values,
    blocks,  # [sequences, table_width]
    lengths,
    accepted,
    order,  # [sequences, k + 1]
    layer_stride,
    block_size,
    table_width,
    k,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys and values of the accepted nodes to where those of a chain would be. They only move forward, in order: none
    is overwritten that is still to be moved."""
    layer = tl.program_id(0).to(tl.int64) * layer_stride
    seq = tl.program_id(1)
    count = tl.load(accepted + seq)
    start = tl.load(lengths + seq) - count - 1  # of the last token
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    table = blocks + seq * table_width
    for index in range(1, count + 1):
        node = tl.load(order + seq * (k + 1) + index)
        if node != index:
            source, target = start + node, start + index
            source_at = layer + (tl.load(table + source // block_size) * block_size + source % block_size) * SIZE
            target_at = layer + (tl.load(table + target // block_size) * block_size + target % block_size) * SIZE
            tl.store(keys + target_at + column, tl.load(keys + source_at + column, mask=inside), mask=inside)
            tl.store(values + target_at + column, tl.load(values + source_at + column, mask=inside), mask=inside)
