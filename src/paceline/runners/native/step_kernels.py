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
        *("depths", "tree_mask", "best", "lengths", "accepted", "grown", "last_tokens", "leaf", "order", "result"),
        "blocks",
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
    second,
    second_confidence,
    count,
    limits,
    token_ids,  # what the target reads: [sequences, nodes], as depths and tree_mask
    counts,
    depths,
    tree_mask,
    drafted_stride,
    nodes,
    k,
    least,
    HAS_COUNT: tl.constexpr,
    HAS_LEAF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The draft tokens of a step into the inputs of the target.

    With a leaf the last draft token has its second choice beside it, if that has at least the probability `least`.
    """
    seq = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    row, inside = seq * nodes, (place > 0) & (place <= k)
    tokens = tl.load(drafted + seq * drafted_stride + place - 1, mask=inside, other=0)
    if HAS_COUNT:
        made = tl.minimum(tl.load(limits + seq), tl.load(count).to(tl.int64))
        tokens = tl.where(place <= made, tokens, 0)  # what steps left that were not taken may be no token at all
        held = made + 1
        if HAS_LEAF:
            at = seq * drafted_stride + made - 1
            is_sent = tl.where(made + 2 <= nodes, tl.load(second_confidence + at), -1.0) >= least
            is_leaf = tl.where(is_sent, place == made + 1, place < 0)
            tokens = tl.where(is_leaf, tl.load(second + at), tokens)
            node = place.to(tl.int64)
            chain = (tl.full([BLOCK], 2, tl.int64) << node) - 1
            own = (tl.full([BLOCK], 1, tl.int64) << made) - 1 + (tl.full([BLOCK], 2, tl.int64) << made)
            tl.store(depths + row + place, tl.where(is_leaf, made, node), mask=place < nodes)
            tl.store(tree_mask + row + place, tl.where(is_leaf, own, chain), mask=place < nodes)
            held += is_sent.to(tl.int64)
            inside = inside | is_leaf
        tl.store(counts + seq, held)
    tl.store(token_ids + row + place, tokens, mask=inside)


@unspecialized
def settle(
    drafted,
    confidence,
    second,
    second_confidence,
    count,
    limits,
    best,  # of the target, [sequences · nodes]
    token_ids,
    counts,
    lengths,
    accepted,  # outputs: draft tokens of the chain, …
    grown,  # … tokens that the sequence grows by, its last two, whether the leaf was accepted, and a row for the host
    last_tokens,
    leaf,
    result,
    drafted_stride,
    nodes,
    k,
    HAS_COUNT: tl.constexpr,
    HAS_LEAF: tl.constexpr,
    HAS_CONFIDENCE: tl.constexpr,
    UNIT: tl.constexpr,
    FIELDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Accept draft tokens up to the first that is not the target's argmax, and let the target's inputs go on."""
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
    total, is_sent, is_right, other, other_sure = chain, chain * 0, chain * 0, chain * 0, chain * 0
    if HAS_LEAF:
        at = seq * drafted_stride + made - 1
        other, other_sure = tl.load(second + at), (tl.load(second_confidence + at) * UNIT).to(tl.int64)
        is_sent = (held > made + 1).to(tl.int64)
        is_right = is_sent * (chain == made - 1).to(tl.int64) * (other == next_token).to(tl.int64)
        before = tl.where(is_right != 0, other, before)
        after_leaf = tl.sum(tl.where(place == made + 1, own, 0), axis=0)
        next_token = tl.where(is_right != 0, after_leaf, next_token)
        total = chain + is_right
        tl.store(leaf + seq, is_right)
    tl.store(token_ids + seq * nodes, next_token)
    tl.store(lengths + seq, tl.load(lengths + seq) + total + 1)
    tl.store(accepted + seq, chain)
    tl.store(grown + seq, total + 1)
    tl.store(last_tokens + seq * 2, before)
    tl.store(last_tokens + seq * 2 + 1, next_token)
    row = result + seq * (FIELDS + 2 * k)
    tl.store(row, chain)
    tl.store(row + 1, next_token)
    tl.store(row + 2, made)
    tl.store(row + 3, is_sent)
    tl.store(row + 4, is_right)
    tl.store(row + 5, other)
    tl.store(row + 6, other_sure)
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
    leaf,
    layer_stride,
    block_size,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Keys and values of an accepted leaf to where those of the last draft token were, of the first sequence."""
    if tl.load(leaf) != 0:
        at = tl.program_id(0).to(tl.int64) * layer_stride
        end = tl.load(lengths)
        source = at + (tl.load(blocks + end // block_size) * block_size + end % block_size) * SIZE
        end -= 1
        target = at + (tl.load(blocks + end // block_size) * block_size + end % block_size) * SIZE
        column = tl.arange(0, BLOCK)
        inside = column < SIZE
        tl.store(keys + target + column, tl.load(keys + source + column, mask=inside), mask=inside)
        tl.store(values + target + column, tl.load(values + source + column, mask=inside), mask=inside)
