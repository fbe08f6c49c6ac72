"""What lies between the passes of steps in a row, as a few small kernels: thirty of torch took 4% of a step."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

# Sizes and addresses differ from graph to graph and from step to step: none of them is a reason to compile again.
UNSPECIALIZED: dict[str, list[str]] = {
    "do_not_specialize": ["drafted_stride", "nodes", "k", "layer_stride", "block_size", "table_width"],
    "do_not_specialize_on_alignment": [
        *("drafted", "confidence", "second", "second_confidence", "parents", "count", "limits", "token_ids", "counts"),
        *("depths", "tree_mask", "best", "lengths", "accepted", "grown", "last_tokens", "shift", "order", "result"),
        *("blocks", "leaf_limits"),
    ],
}


def unspecialized(kernel: Any) -> Any:
    """A kernel that is compiled once for all sizes of steps and all addresses."""
    names = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
    options = {option: [name for name in own if name in names] for option, own in UNSPECIALIZED.items()}
    return triton.jit(kernel, **options)


@unspecialized
def put_drafts(
    drafted,  # [sequences, …], and how far rows of it lie apart: so do those of second and second_confidence
    confidence,
    second,
    second_confidence,
    leaf_limits,  # see LeafWords
    count,
    limits,
    token_ids,  # what the target reads: [sequences, nodes], as depths and tree_mask
    counts,
    depths,
    tree_mask,
    drafted_stride,
    nodes,
    k,
    HAS_COUNT: tl.constexpr,
    HAS_LEAVES: tl.constexpr,
    MOST_LEAVES: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The draft tokens of a step into the inputs of the target.

    With leaves the second choices that promise enough come behind the chain, the first of them if there is no room for
    all. One promises as many tokens as it is probable that all before it are accepted and that it is.
    """
    seq = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    row, inside = seq * nodes, (place > 0) & (place <= k)
    tokens = tl.load(drafted + seq * drafted_stride + place - 1, mask=inside, other=0)
    if HAS_COUNT:
        made = tl.minimum(tl.load(limits + seq), tl.load(count).to(tl.int64))
        tokens = tl.where(place <= made, tokens, 0)  # what steps left that were not taken may be no token at all
        held = made + 1
        if HAS_LEAVES:
            column = tl.arange(0, BINS)[None, :]
            at = seq * drafted_stride + place - 1
            beside = (place > 0) & (place <= made)  # the node of a draft token that a second choice would stand beside
            edges = tl.load(leaf_limits + column)
            stated = tl.load(confidence + at - 1, mask=beside & (place > 1), other=0.0)  # of the draft token before it
            bins = tl.sum((stated[:, None] >= edges).to(tl.int32), axis=1)
            rates = tl.load(leaf_limits + BINS + bins, mask=beside & (place > 1), other=1.0)
            stated = tl.load(second_confidence + at, mask=beside, other=0.0)
            bins = tl.sum((stated[:, None] >= edges).to(tl.int32), axis=1)
            promised = tl.cumprod(rates, axis=0) * tl.load(leaf_limits + 2 * BINS + bins)
            is_sent = beside & (promised >= tl.load(leaf_limits + 3 * BINS))
            rank = tl.cumsum(is_sent.to(tl.int64), axis=0)
            is_sent = is_sent & (rank <= MOST_LEAVES) & (made + rank < nodes)
            leaf, end = made + rank, made + tl.sum(is_sent.to(tl.int64), axis=0)
            tl.store(token_ids + row + leaf, tl.load(second + at, mask=is_sent, other=0), mask=is_sent)
            own = (tl.full([BLOCK], 1, tl.int64) << place.to(tl.int64)) - 1 + (tl.full([BLOCK], 1, tl.int64) << leaf)
            tl.store(depths + row + leaf, place, mask=is_sent)
            tl.store(tree_mask + row + leaf, own, mask=is_sent)
            no_leaf = (place < nodes) & ((place <= made) | (place > end))
            tl.store(depths + row + place, place, mask=no_leaf)
            chain = (tl.full([BLOCK], 2, tl.int64) << place.to(tl.int64)) - 1
            tl.store(tree_mask + row + place, chain, mask=no_leaf)
            held, inside = end + 1, inside & no_leaf
        tl.store(counts + seq, held)
    tl.store(token_ids + row + place, tokens, mask=inside)


@unspecialized
def settle(
    drafted,
    confidence,
    second_confidence,
    count,
    limits,
    best,  # of the target, [sequences · nodes]
    token_ids,
    counts,
    depths,
    lengths,
    accepted,  # outputs: draft tokens of the chain, tokens that the sequence grows by, its last two, …
    grown,
    last_tokens,
    shift,  # … places that an accepted leaf lies behind its own (0: there is none), and a row for the host
    result,
    drafted_stride,
    nodes,
    k,
    HAS_COUNT: tl.constexpr,
    HAS_LEAVES: tl.constexpr,
    MOST_LEAVES: tl.constexpr,
    HAS_CONFIDENCE: tl.constexpr,
    UNIT: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Accept draft tokens up to the first that is not the target's argmax, then the leaf beside that one if it is, and
    let the target's inputs go on."""
    seq = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    own = tl.load(best + seq * nodes + place, mask=place < nodes, other=-2)
    tokens = tl.load(drafted + seq * drafted_stride + place, mask=place < k, other=-1)
    held = tl.load(counts + seq)
    made = held - 1
    if HAS_COUNT:
        made = tl.minimum(tl.load(limits + seq), tl.load(count).to(tl.int64))
    right = (tokens == own) & (place < made)
    chain = tl.min(tl.where(right, BLOCK, place), axis=0).to(tl.int64)
    next_token = tl.sum(tl.where(place == chain, own, 0), axis=0)
    before = tl.sum(tl.where(place == chain - 1, tokens, 0), axis=0)
    before = tl.where(chain > 0, before, tl.load(token_ids + seq * nodes))
    total, leaf = chain, chain * 0
    row = result + seq * (FIELDS + 2 * k + 3 * MOST_LEAVES)
    if HAS_LEAVES:
        is_leaf = (place > made) & (place < held)
        others = tl.load(token_ids + seq * nodes + place, mask=is_leaf, other=-1)
        depth = tl.load(depths + seq * nodes + place, mask=is_leaf, other=1)
        is_right = is_leaf & (depth == chain + 1) & (others == next_token)
        leaf = tl.sum(tl.where(is_right, place, 0), axis=0).to(tl.int64)
        total = chain + (leaf > 0).to(tl.int64)
        before = tl.where(leaf > 0, next_token, before)
        next_token = tl.where(leaf > 0, tl.sum(tl.where(place == leaf, own, 0), axis=0), next_token)
        tl.store(shift + seq, tl.where(leaf > 0, leaf - total, 0))
        sure = tl.load(second_confidence + seq * drafted_stride + depth - 1, mask=is_leaf, other=0.0)
        leaves = row + FIELDS + 2 * k + place - made - 1
        tl.store(leaves, others, mask=is_leaf)
        tl.store(leaves + MOST_LEAVES, depth, mask=is_leaf)
        tl.store(leaves + 2 * MOST_LEAVES, (sure * UNIT).to(tl.int64), mask=is_leaf)
    tl.store(token_ids + seq * nodes, next_token)
    tl.store(lengths + seq, tl.load(lengths + seq) + total + 1)
    tl.store(accepted + seq, chain)
    tl.store(grown + seq, total + 1)
    tl.store(last_tokens + seq * 2, before)
    tl.store(last_tokens + seq * 2 + 1, next_token)
    tl.store(row, chain)
    tl.store(row + 1, next_token)
    tl.store(row + 2, made)
    tl.store(row + 3, held - made - 1)
    tl.store(row + 4, leaf)
    tl.store(row + FIELDS + place, tokens, mask=place < k)
    stated = tl.full([BLOCK], -1, tl.int64)
    if HAS_CONFIDENCE:
        stated = (tl.load(confidence + seq * drafted_stride + place, mask=place < k, other=0.0) * UNIT).to(tl.int64)
    tl.store(row + FIELDS + k + place, stated, mask=place < k)


@unspecialized
def move_leaf(
    keys,  # [layers, tokens, size], and how far layers lie apart
    values,
    blocks,
    lengths,
    shift,
    layer_stride,
    block_size,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys and values of an accepted leaf to where those of the draft token beside it were, of the first sequence."""
    distance = tl.load(shift)
    if distance != 0:
        at = tl.program_id(0).to(tl.int64) * layer_stride
        end = tl.load(lengths) - 1
        target = at + (tl.load(blocks + end // block_size) * block_size + end % block_size) * SIZE
        end += distance
        source = at + (tl.load(blocks + end // block_size) * block_size + end % block_size) * SIZE
        column = tl.arange(0, BLOCK)
        inside = column < SIZE
        tl.store(keys + target + column, tl.load(keys + source + column, mask=inside), mask=inside)
        tl.store(values + target + column, tl.load(values + source + column, mask=inside), mask=inside)
