"""Draft trees out of one block: the likeliest paths through the likeliest tokens of every depth.

The rows of a block do not depend on the tokens drafted before them, so one pass knows the alternatives of all depths.
Nodes join the tree in the order of their probability. Tokens are chosen, not drawn: q is one-hot and sampling stays
exact. Papers: JetSpec, https://arxiv.org/abs/2606.18394; DDTree, https://arxiv.org/abs/2604.12989
"""

from __future__ import annotations

import heapq
from math import exp

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.drafting.block_rows import DraftRows, RankedRows


def likeliest_trees(rows: DraftRows, branches: int, limits: list[int]) -> list[DraftTree]:
    """For every sequence a tree of at most limits[i] nodes, each with at most `branches` children."""
    ranked = rows.ranked(branches)
    return [_likeliest_tree(ranked, index, limit) for index, limit in enumerate(limits)]


def _likeliest_tree(ranked: RankedRows, index: int, limit: int) -> DraftTree:
    """The next candidates of a node are its first child and its next sibling: neither is likelier than it."""
    scores: list[list[list[float]]] = ranked.scores[index].tolist()  # [depth][place of the token before][rank]
    places: list[list[list[int]]] = ranked.places[index].tolist()
    depths: list[int] = []
    chosen: list[int] = []
    parents: list[int] = []
    confidence: list[float] = []  # the probability of a node where the one before it is accepted
    waiting = [(-scores[0][0][0], draft_tree.ROOT, 0, 0, 0, 0.0)]
    while waiting and len(parents) < limit:
        cost, parent, depth, before, rank, parent_cost = heapq.heappop(waiting)
        node, place = len(parents), places[depth][before][rank]
        depths.append(depth)
        chosen.append(place)
        parents.append(parent)
        confidence.append(exp(scores[depth][before][rank]))
        if rank + 1 < len(scores[depth][before]):
            sibling = parent_cost - scores[depth][before][rank + 1]
            heapq.heappush(waiting, (sibling, parent, depth, before, rank + 1, parent_cost))
        if depth + 1 < len(scores):
            child = cost - scores[depth + 1][place][0]
            heapq.heappush(waiting, (child, node, depth + 1, place, 0, cost))
    return DraftTree(ranked.tokens[index][depths, chosen], parents, confidence=confidence)
