"""Medusa heads predict several tokens ahead from one hidden state.

Head h predicts the token h positions further on, without knowing the tokens between: the predictions of one head are
alternatives, and every combination of them is a path. A sparse tree of these paths is verified, grown from the
likeliest node on: the node with the likeliest path joins next. The draft tokens are chosen, so q is one-hot and
sampling stays exact.
"""

from __future__ import annotations

import heapq
import math

import torch
from torch import Tensor

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Drafter, Runner
from paceline.core.sequence import Sequence
from paceline.core.types import Capability, RowOutput, StepResult
from paceline.drafting.head_folder import checked_target, head_folder
from paceline.drafting.registry import DrafterContext, DrafterSpec, WeightsNeeded, options_of
from paceline.errors import OptionError, PairError
from paceline.heads.medusa import MedusaHeads
from paceline.heads.registry import load_head


class Medusa(Drafter):
    """Drafts with Medusa heads."""

    def __init__(self, heads: MedusaHeads, target: Runner, *, branches: int = 6, nodes: int = 0) -> None:
        """branches: alternatives of each head, 1 makes chains. nodes: of the tree, at most; 0: num_draft_tokens."""
        if branches < 1 or nodes < 0:
            raise OptionError("medusa needs at least one branch, and nodes of 0 or more")
        _check_pair(heads, target)
        tree = {Capability.TREE} if branches > 1 else set()
        self.needs = frozenset({Capability.HIDDEN_STATES, *tree})
        self.nodes, self.branches = nodes, min(branches, heads.config.draft_vocab_size)
        self._heads = heads
        self._states: dict[int, Tensor] = {}  # of each sequence: the target's state after its last but one token
        target.expose(hidden=True)

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        self.end(seq)
        if prompt is not None and prompt.hidden is not None:
            self._states[seq.seq_id] = prompt.hidden[-1]

    @torch.inference_mode()
    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        trees = [draft_tree.empty() for _ in seqs]
        active = [i for i, seq in enumerate(seqs) if num_draft_tokens[i] > 0 and seq.seq_id in self._states]
        if not active:
            return trees
        limits = [min(num_draft_tokens[i], self.nodes) if self.nodes else num_draft_tokens[i] for i in active]
        states = torch.stack([self._states[seqs[i].seq_id] for i in active])
        logits = self._heads(states, min(self._heads.config.num_heads, max(limits))).float()  # [heads, seqs, vocab]
        best = logits.topk(self.branches, dim=-1)
        scores = (best.values - logits.logsumexp(dim=-1, keepdim=True)).tolist()
        tokens = self._heads.to_target_ids(best.indices)
        for row, index in enumerate(active):
            trees[index] = likeliest_tree([head[row] for head in scores], tokens[:, row], limits[row])
        return trees

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        for seq, result in zip(seqs, results):
            self.end(seq)
            # A step without states leaves nothing to draft from.
            if result.output.hidden is not None and result.emitted:
                self._states[seq.seq_id] = result.output.hidden[result.kept_rows[-1]]

    def end(self, seq: Sequence) -> None:
        self._states.pop(seq.seq_id, None)


def likeliest_tree(scores: list[list[float]], tokens: Tensor, limit: int) -> DraftTree:
    """The `limit` likeliest nodes over all combinations of the heads' tokens, most likely first.

    scores[h][r]  log-probability of head h's token of rank r, falling with r
    tokens        int64 [heads, ranks]
    The next candidates of a node are its first child and its next sibling: neither is likelier, so none is missed.
    """
    heads: list[int] = []
    ranks: list[int] = []
    parents: list[int] = []
    waiting: list[tuple[float, int, int, int, float]] = [(-scores[0][0], draft_tree.ROOT, 0, 0, 0.0)]
    while waiting and len(parents) < limit:
        cost, parent, head, rank, parent_cost = heapq.heappop(waiting)
        node = len(parents)
        heads.append(head)
        ranks.append(rank)
        parents.append(parent)
        if rank + 1 < len(scores[head]):
            heapq.heappush(waiting, (parent_cost - scores[head][rank + 1], parent, head, rank + 1, parent_cost))
        if head + 1 < len(scores):
            heapq.heappush(waiting, (cost - scores[head + 1][0], node, head + 1, 0, cost))
    confidence = [math.exp(scores[head][rank]) for head, rank in zip(heads, ranks)]
    return DraftTree(tokens[heads, ranks], parents, confidence=confidence)


def _check_pair(heads: MedusaHeads, target: Runner) -> None:
    """Raise PairError where heads were trained for another target."""
    config, info = heads.config, target.info
    if config.hidden_size != info.hidden_size:
        raise PairError(f"these heads read states of {config.hidden_size} values; {info.name} has {info.hidden_size}")
    largest = int(heads.to_target_ids(torch.arange(config.draft_vocab_size, device=heads.token_map.device)).max())
    if largest >= info.vocab_size:
        raise PairError(f"these heads predict token {largest}; {info.name} has {info.vocab_size} tokens")


# --- building ---------------------------------------------------------------------------------------------------------


def build(context: DrafterContext) -> Medusa:
    target = checked_target(SPEC.name, context.target, Capability.HIDDEN_STATES)
    folder = head_folder(SPEC.name, context)
    heads = load_head(folder, MedusaHeads, dtype=context.head_dtype, device=context.device)
    return Medusa(heads, target, **context.options)


SPEC = DrafterSpec(
    name="medusa",
    summary="Medusa heads on the target's last hidden state draft a tree",
    weights=WeightsNeeded.HEAD,
    build=build,
    options=options_of(Medusa),
    reference="Medusa, https://arxiv.org/abs/2401.10774",
    head_kind="medusa",
)
