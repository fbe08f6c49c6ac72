"""DraftTree: the draft tokens of one step for one sequence.

A chain is a tree in which every node has one child. Nodes are stored so that a parent always comes before its
children, which makes the acceptance walk one loop in index order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import OptionError

ROOT = -1  # the parent of a node that follows the sequence itself


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """Draft tokens and their parents.

    tokens   int64 [nodes], on whatever device the drafter worked
    parents  the node before each node; -1 is the sequence itself
    probs    [nodes, vocab] the distribution each node was drawn from; None: the tokens were chosen, q is one-hot
    probes   this many of the last nodes are read in the pass and cannot be accepted (lookahead)
    confidence  the drafter's own estimate that each node is accepted, given that its path is; None: it has none.
                That of a drawn node may depend on the nodes before it and never on what was drawn for it
    source   the drafter that made it, where several take turns
    leaves   this many of the last nodes are second choices for nodes of a chain, and took no time to make
    """

    tokens: Tensor
    parents: list[int]
    probs: Tensor | None = None
    probes: int = 0
    confidence: list[float] | None = None
    source: str = ""
    leaves: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, Tensor):
            object.__setattr__(self, "tokens", torch.tensor(self.tokens, dtype=torch.int64))
        if not isinstance(self.parents, list):
            object.__setattr__(self, "parents", [int(parent) for parent in self.parents])
        if self.tokens.shape != (len(self.parents),):
            raise OptionError(f"a tree needs one parent a token: {tuple(self.tokens.shape)} and {len(self.parents)}")
        if not is_chain(self.parents):
            _check_order(self.parents)
        if self.probs is not None and self.probs.shape[0] != len(self.parents):
            raise OptionError(f"a tree needs one distribution a node: {self.probs.shape[0]} for {len(self.parents)}")
        if self.confidence is not None and len(self.confidence) != len(self.parents):
            raise OptionError(f"a tree needs one confidence a node: {len(self.confidence)} for {len(self.parents)}")

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def num_draft_tokens(self) -> int:
        """Nodes that can be accepted."""
        return len(self.parents) - self.probes

    @property
    def num_made(self) -> int:
        """Draft tokens that took time to make."""
        return self.num_draft_tokens - self.leaves

    @property
    def is_chain(self) -> bool:
        return is_chain(self.parents[: self.num_draft_tokens])


def _check_order(parents: list[int]) -> None:
    for node, parent in enumerate(parents):
        if not ROOT <= parent < node:
            raise OptionError(f"node {node} has parent {parent}; a parent comes before its children")


def is_chain(parents: list[int]) -> bool:
    """Whether every node follows the one before it. Compared as lists: this runs for every row of every step."""
    count = len(parents)
    return parents == (_CHAIN[:count] if count <= len(_CHAIN) else list(range(-1, count - 1)))


_CHAIN = list(range(-1, 4096))
_EMPTY = DraftTree(torch.empty(0, dtype=torch.int64), [])


def empty() -> DraftTree:
    """No draft token at all: plain decoding."""
    return _EMPTY


def chain(
    tokens: Tensor | Sequence[int], probs: Tensor | None = None, confidence: list[float] | None = None
) -> DraftTree:
    """Draft tokens one after another."""
    ids = tokens if isinstance(tokens, Tensor) else torch.tensor(list(tokens), dtype=torch.int64)
    return DraftTree(ids, list(range(-1, ids.shape[0] - 1)), probs, confidence=confidence)


def with_source(tree: DraftTree, source: str) -> DraftTree:
    """The same tree under the name of its drafter. What has been checked is not checked again, as `replace` would."""
    named = object.__new__(DraftTree)
    for name in DraftTree.__slots__:
        object.__setattr__(named, name, getattr(tree, name))
    object.__setattr__(named, "source", source)
    return named


def merge(paths: Iterable[Sequence[int]], limit: int) -> DraftTree:
    """One tree of several candidate continuations; a shared prefix is stored once.

    Earlier paths come first among siblings and are the last to be cut when `limit` nodes are reached.
    """
    tokens: list[int] = []
    parents: list[int] = []
    children: dict[tuple[int, int], int] = {}
    for path in paths:
        node = ROOT
        for token in path:
            child = children.get((node, token))
            if child is None:
                if len(tokens) == limit:
                    break
                child = len(tokens)
                children[node, token] = child
                tokens.append(token)
                parents.append(node)
            node = child
    return DraftTree(torch.tensor(tokens, dtype=torch.int64), parents)


def select(tree: DraftTree, nodes: list[int]) -> DraftTree:
    """The tree of these nodes alone, in their order. Every node comes with its parent."""
    if len(nodes) == len(tree):
        return tree
    if not nodes:
        return empty()
    number = {ROOT: ROOT} | {node: index for index, node in enumerate(nodes)}
    return DraftTree(
        tree.tokens[: len(nodes)] if nodes[-1] == len(nodes) - 1 else tree.tokens[nodes],
        [number[tree.parents[node]] for node in nodes],
        None if tree.probs is None else tree.probs[nodes],
        confidence=None if tree.confidence is None else [tree.confidence[node] for node in nodes],
        source=tree.source,
    )


def depths(parents: Sequence[int]) -> list[int]:
    """How many nodes come before each node on its path: its position after the sequence."""
    depth_of: list[int] = []
    for parent in parents:
        depth_of.append(0 if parent == ROOT else depth_of[parent] + 1)
    return depth_of


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the sequence down to `node`, itself included."""
    path: list[int] = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return path[::-1]


def ancestors(parents: Sequence[int]) -> Tensor:
    """bool [nodes, nodes]: row i attends to column j where j is i or comes before it on its path."""
    count = len(parents)
    if all(parent == node - 1 for node, parent in enumerate(parents)):
        return torch.ones(count, count, dtype=torch.bool).tril_()
    mask = torch.eye(count, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent != ROOT:
            mask[node] |= mask[parent]
    return mask
