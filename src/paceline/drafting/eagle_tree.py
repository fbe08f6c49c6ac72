"""Draft trees of an EAGLE head (EAGLE-2): expand the likeliest nodes of every depth, keep the likeliest of all nodes.

Tokens are chosen, not drawn, so q is one-hot and sampling stays exact.
Paper: EAGLE-2, https://arxiv.org/abs/2406.16858
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.device.properties import on_host
from paceline.drafting.eagle_state import HeadState
from paceline.heads.eagle import ChainHead
from paceline.heads.kv_cache import KeyBuffers


@dataclass(frozen=True, slots=True, eq=False)
class _Level:
    """Nodes of one depth, for all sequences at once. Every tensor is [sequences, nodes]."""

    tokens: Tensor
    scores: Tensor  # log-probability of the whole path
    parents: Tensor  # index among all nodes, in the order of the levels


@dataclass(frozen=True, slots=True, eq=False)
class _Frontier:
    """The nodes to expand next: [sequences, branches] each."""

    tokens: Tensor
    scores: Tensor
    nodes: Tensor  # index among all nodes
    ancestors: Tensor  # bool [sequences, branches, expanded + branches]: the node and the expanded nodes above it

    @classmethod
    def of(cls, level: _Level) -> _Frontier:
        """All nodes of the first level."""
        num_seqs, count = level.tokens.shape
        nodes = torch.arange(count, device=level.tokens.device).expand(num_seqs, -1)
        own = torch.eye(count, dtype=torch.bool, device=level.tokens.device)
        return cls(level.tokens, level.scores, nodes, own.expand(num_seqs, -1, -1))

    def below(self, level: _Level, chosen: Tensor, first: int) -> _Frontier:
        """The frontier one level deeper: the chosen nodes of that level, whose first node has index `first`."""
        count = chosen.shape[1]
        parents = chosen // count
        inherited = self.ancestors.gather(1, parents[..., None].expand(-1, -1, self.ancestors.shape[-1]))
        own = torch.eye(count, dtype=torch.bool, device=chosen.device).expand(chosen.shape[0], -1, -1)
        ancestors = torch.cat([inherited, own], dim=-1)
        return _Frontier(level.tokens.gather(1, chosen), level.scores.gather(1, chosen), chosen + first, ancestors)

    def mask(self, lengths: list[int], columns: int) -> Tensor:
        """bool [sequences, 1, branches, columns]: the entries of the sequence, the node's ancestors and itself."""
        length = torch.tensor(lengths, device=self.tokens.device)
        visible = torch.arange(columns, device=self.tokens.device) < length[:, None]
        count, expanded = self.ancestors.shape[1:]
        node_columns = length[:, None] + torch.arange(expanded, device=self.tokens.device)
        mask = visible[:, None].repeat(1, count, 1)
        return mask.scatter_(2, node_columns[:, None].expand(-1, count, -1), self.ancestors)[:, None]


class TreeDrafting:
    """Grows trees with one head. The KV of nodes lies behind the entries of their sequence and is overwritten."""

    def __init__(self, head: ChainHead, buffers: KeyBuffers, branches: int, depth: int) -> None:
        self._head, self._buffers, self._branches, self._depth = head, buffers, branches, depth
        self._device = head.like.device

    def trees(self, states: list[HeadState], out: Tensor, limits: list[int]) -> list[DraftTree]:
        """Trees of at most limits[i] nodes. out: the head's output at their last positions [sequences, hidden]."""
        return _best_nodes(list(self._grow(states, out[:, None], limits)), limits)

    def _grow(self, states: list[HeadState], out: Tensor, limits: list[int]) -> Iterator[_Level]:
        """Levels of nodes, each the children of the likeliest nodes of the one before."""
        tokens, scores = self._children(out)
        level = _Level(tokens[:, 0], scores[:, 0], torch.full_like(tokens[:, 0], draft_tree.ROOT))
        yield level
        all_scores, first = level.scores, 0
        frontier, out = _Frontier.of(level), out.expand(-1, self._branches, -1)
        for depth in range(1, min(self._depth, max(limits))):
            if self._is_complete(frontier, all_scores, limits):
                return
            out = self._pass(states, frontier, out, depth - 1)
            first += level.tokens.shape[1]
            level = self._next_level(frontier, out)
            yield level
            all_scores = torch.cat([all_scores, level.scores], dim=1)
            chosen = level.scores.topk(self._branches, dim=1).indices
            out = out.gather(1, (chosen // self._branches)[..., None].expand(-1, -1, out.shape[-1]))
            frontier = frontier.below(level, chosen, first)

    def _next_level(self, frontier: _Frontier, out: Tensor) -> _Level:
        tokens, scores = self._children(out)
        scores = scores + frontier.scores[..., None]
        parents = frontier.nodes.repeat_interleave(self._branches, dim=1)
        return _Level(tokens.flatten(1), scores.flatten(1), parents)

    def _children(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest next tokens after each row and their log-probabilities. Both [sequences, rows, branches]"""
        logits = self._head.logits(out).float()
        best = logits.topk(self._branches, dim=-1)
        scores = best.values - logits.logsumexp(dim=-1, keepdim=True)
        return self._head.to_target_ids(best.indices), scores

    def _pass(self, states: list[HeadState], frontier: _Frontier, g: Tensor, depth: int) -> Tensor:
        """Read the frontier, `depth` levels below the root."""
        count, lengths = self._branches, [state.length for state in states]
        columns = [length + depth * count for length in lengths]
        position = torch.tensor([state.next_position + depth for state in states], device=self._device)
        store = self._buffers.at([state.row for state in states], columns, count)
        mask = frontier.mask(lengths, max(columns) + count)
        return self._head.block(self._head.embed(frontier.tokens), g, position[:, None].expand(-1, count), mask, store)

    def _is_complete(self, frontier: _Frontier, scores: Tensor, limits: list[int]) -> bool:
        """Whether no child can be among the best: a path is never likelier than its prefix.

        The answer makes the host wait for an asynchronous device; there the tree grows to its full depth instead.
        """
        if not on_host(self._device) or scores.shape[1] < max(limits):
            return False
        ordered = scores.sort(dim=1, descending=True).values
        worst = ordered[torch.arange(len(limits)), torch.tensor(limits) - 1]
        return bool((frontier.scores.amax(dim=1) <= worst).all())


def _best_nodes(levels: list[_Level], limits: list[int]) -> list[DraftTree]:
    """The likeliest of all nodes of each sequence. An ancestor is never less likely, so it is always among them."""
    scores = torch.cat([level.scores for level in levels], dim=1)
    tokens = torch.cat([level.tokens for level in levels], dim=1)
    parents = torch.cat([level.parents for level in levels], dim=1).tolist()
    # Stable: of equal scores the one of the earlier level comes first, and a parent may equal its child.
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, : max(limits)].tolist()
    trees: list[DraftTree] = []
    for row, limit in enumerate(limits):
        nodes = sorted(order[row][:limit])
        index = {node: rank for rank, node in enumerate(nodes)} | {draft_tree.ROOT: draft_tree.ROOT}
        trees.append(DraftTree(tokens[row, nodes], [index[parents[row][node]] for node in nodes]))
    return trees
