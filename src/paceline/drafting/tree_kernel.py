"""block_tree.likeliest_trees on the device: the likeliest paths through a block, without a look at a value by the host.

A node that is in the tree has one candidate, the next of its children in the order of their rank. The likeliest of all
candidates joins the tree and has a candidate from then on, and its parent the next one. So the first nodes of a tree
are the tree of fewer nodes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from paceline.core.types import DraftOutput
from paceline.drafting.block_rows import RankedRows

FEWEST_LANES = 16


def likeliest_nodes(ranked: RankedRows, num_nodes: int) -> DraftOutput:
    """A tree of so many nodes for every sequence, in falling order of probability."""
    num_seqs, depth, before, ranks = ranked.scores.shape
    tokens, parents = torch.zeros(2, num_seqs, num_nodes, dtype=torch.int64, device=ranked.scores.device)
    grow_trees[(num_seqs,)](
        *(ranked.scores.contiguous(), ranked.places.contiguous(), ranked.tokens.contiguous(), tokens, parents),
        *(ranked.tokens.shape[-1], num_nodes, depth, before, ranks),
        LANES=max(FEWEST_LANES, 1 << num_nodes.bit_length()),  # one for the sequence itself
        num_warps=1,
    )
    return DraftOutput(tokens, parents=parents)


@triton.jit(do_not_specialize=["num_tokens", "num_nodes", "depth", "before", "ranks"])
def grow_trees(
    scores,  # [sequences, depth, tokens before, ranks], as places
    places,
    tokens,  # [sequences, depth, num_tokens]
    drafted,  # [sequences, num_nodes], as parents
    parents,
    num_tokens,
    num_nodes,
    depth,
    before,
    ranks,
    LANES: tl.constexpr,
):
    """Lane 0 is the sequence itself, and lane i the i-th node."""
    seq = tl.program_id(0)
    lane = tl.arange(0, LANES)
    likelihood = tl.where(lane == 0, 0.0, float("-inf"))  # of the path to a node
    depth_behind = tl.zeros([LANES], dtype=tl.int32)  # of its children
    place = tl.zeros([LANES], dtype=tl.int32)  # among the tokens of its depth
    rank = tl.zeros([LANES], dtype=tl.int32)  # of its candidate
    for node in range(1, num_nodes + 1):
        has_more = (lane < node) & (depth_behind < depth) & (rank < ranks)
        at = ((seq * depth + depth_behind) * before + place) * ranks + rank
        candidate = likelihood + tl.load(scores + at, mask=has_more, other=float("-inf"))
        best = tl.max(candidate, axis=0)
        parent = tl.min(tl.where((candidate == best) & has_more, lane, LANES - 1), axis=0)
        own_depth = tl.sum(tl.where(lane == parent, depth_behind, 0), axis=0)
        own_at = tl.sum(tl.where(lane == parent, at, 0), axis=0)
        own_place = tl.load(places + own_at).to(tl.int32)
        token = tl.load(tokens + (seq * depth + own_depth) * num_tokens + own_place)
        tl.store(drafted + seq * num_nodes + node - 1, token)
        tl.store(parents + seq * num_nodes + node - 1, parent)
        rank = tl.where(lane == parent, rank + 1, rank)
        likelihood = tl.where(lane == node, best, likelihood)
        depth_behind = tl.where(lane == node, own_depth + 1, depth_behind)
        place = tl.where(lane == node, own_place, place)
