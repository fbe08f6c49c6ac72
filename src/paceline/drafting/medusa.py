"""Medusa heads draft token several tokens ahead from one hidden state.

Head h says the token h places further on, without knowing what stands between: so the draft tokens of one head are
alternatives, and every combination of them is a path. Of these paths a sparse tree is put to the target, grown from the
likeliest node on: at each step the node whose path the heads hold for most likely joins. The draft tokens are chosen, so q
is one-hot and sampling stays exact.
"""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Drafter, Runner
from paceline.core.sequence import Sequence
from paceline.core.types import Capability, RowOutput, StepResult
from paceline.errors import OptionError, PairError
from paceline.heads.medusa import MedusaHeads


class Medusa(Drafter):
    """Drafts with Medusa heads."""

    def __init__(self, heads: MedusaHeads, target: Runner, *, branches: int = 6, nodes: int = 0) -> None:
        """branches: alternatives of each head, 1 makes chains. nodes: of the tree, at most; 0: as the draft length says."""
        if branches < 1 or nodes < 0:
            raise OptionError("medusa needs at least one branch, and nodes of 0 or more")
        _check_pair(heads, target)
        self.needs = frozenset({Capability.HIDDEN_STATES, Capability.TREE} if branches > 1 else {Capability.HIDDEN_STATES})
        self.nodes, self.branches = nodes, min(branches, heads.config.draft_vocab_size)
        self._heads = heads
        self._states: dict[int, Tensor] = {}  # of each sequence: the target's state after its last but one token
        target.expose(hidden=True)

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        self.end(seq)
        if prompt is not None:
            self._states[seq.seq_id] = _hidden(prompt)[-1]

    @torch.inference_mode()
    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        trees = [draft_tree.empty() for _ in seqs]
        active = [i for i, seq in enumerate(seqs) if num_draft_tokens[i] > 0 and seq.seq_id in self._states]
        if not active:
            return trees
        limits = [min(num_draft_tokens[i], self.nodes) if self.nodes else num_draft_tokens[i] for i in active]
        states = torch.stack([self._states[seqs[i].seq_id] for i in active])
        logits = self._heads(states, min(self._heads.config.heads, max(limits))).float()  # [heads, sequences, draft vocab]
        best = logits.topk(self.branches, dim=-1)
        scores = (best.values - logits.logsumexp(dim=-1, keepdim=True)).tolist()
        tokens = self._heads.to_target_ids(best.indices)
        for place, index in enumerate(active):
            trees[index] = grown([head[place] for head in scores], tokens[:, place], limits[place])
        return trees

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        for seq, result in zip(seqs, results):
            path = result.verified.accepted
            self._states[seq.seq_id] = _hidden(result.output)[path[-1] + 1 if path else 0]

    def end(self, seq: Sequence) -> None:
        self._states.pop(seq.seq_id, None)


def grown(scores: list[list[float]], tokens: Tensor, limit: int) -> DraftTree:
    """The `limit` likeliest nodes over all combinations of the heads' draft tokens, most likely first.

    scores[h][r]  log-probability of head h's draft token of rank r, falling with r
    tokens        int64 [heads, ranks]
    A node's next candidates are its first child and its next sibling: neither is likelier, so none is missed.
    """
    heads: list[int] = []
    ranks: list[int] = []
    parents: list[int] = []
    waiting: list[tuple[float, int, int, int, float]] = [(-scores[0][0], draft_tree.ROOT, 0, 0, 0.0)]
    while waiting and len(parents) < limit:
        cost, parent, head, rank, above = heapq.heappop(waiting)
        node = len(parents)
        heads.append(head)
        ranks.append(rank)
        parents.append(parent)
        if rank + 1 < len(scores[head]):
            heapq.heappush(waiting, (above - scores[head][rank + 1], parent, head, rank + 1, above))
        if head + 1 < len(scores):
            heapq.heappush(waiting, (cost - scores[head + 1][0], node, head + 1, 0, cost))
    return DraftTree(tokens[heads, ranks], parents)


def _hidden(output: RowOutput) -> Tensor:
    assert output.hidden is not None, "the target was asked at assembly to hand out its states"
    return output.hidden


def _check_pair(heads: MedusaHeads, target: Runner) -> None:
    """Raise PairError where heads were made for another target."""
    config, info = heads.config, target.info
    if config.hidden_size != info.hidden_size:
        raise PairError(f"these heads read states of {config.hidden_size} values; {info.name} has {info.hidden_size}")
    largest = int(heads.to_target_ids(torch.arange(config.draft_vocab_size, device=heads.token_map.device)).max())
    if largest >= info.vocab_size:
        raise PairError(f"these heads say token {largest}; {info.name} has {info.vocab_size} tokens")
