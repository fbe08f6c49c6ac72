"""Verification on the device, for a batch of sampled sequences whose draft tokens were drawn there.

The rules are the vectorised twins of core.verify (`AcceptanceRule.on_device`); here they are only fed and, on CUDA, run
as a graph: the host uploads temperatures and random numbers, and copies back one row of integers a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.draft_tree import DraftTree
from paceline.core.sequence import Sequence
from paceline.core.types import ModelOutput, VerifyResult
from paceline.core.verify import AcceptanceRule
from paceline.device.graphs import GraphCache, GraphPool
from paceline.device.scratch import Scratch

SEQS_AT_ONCE = 8  # the distributions of a large batch take hundreds of megabytes


@dataclass(frozen=True, slots=True)
class VerifyKey:
    """What a verification is captured for."""

    rule: AcceptanceRule
    num_seqs: int
    num_draft_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class VerifyBuffers:
    """The fixed tensors of one captured verification. Inputs are copied into them, from wherever they lie.

    The large ones share memory with those of every other verification: a result is copied before the next one runs.
    """

    draft_tokens: Tensor  # int64 [num_seqs, k]
    q: Tensor  # float32 [num_seqs, k, vocab]
    logits: Tensor  # float32 [num_seqs, k + 1, vocab]
    temperatures: Tensor  # float32 [num_seqs, 1, 1]
    uniforms: Tensor  # float64 [num_seqs, k + 1]

    @classmethod
    def allocate(cls, key: VerifyKey, like: Tensor, shared: Scratch) -> VerifyBuffers:
        vocab, device, k = like.shape[-1], like.device, key.num_draft_tokens
        rows = shared.of((key.num_seqs, 2 * k + 1, vocab), device)
        return cls(
            torch.zeros(key.num_seqs, k, dtype=torch.int64, device=device),
            rows[:, :k],
            rows[:, k:],
            torch.ones(key.num_seqs, 1, 1, device=device),
            torch.zeros(key.num_seqs, k + 1, dtype=torch.float64, device=device),
        )

    def put(self, seqs: list[Sequence], trees: list[DraftTree], logits: Tensor) -> None:
        if self.draft_tokens.shape[1]:
            self.draft_tokens.copy_(torch.stack([tree.tokens for tree in trees]), non_blocking=True)
            self.q.copy_(torch.stack([tree.probs for tree in trees if tree.probs is not None]), non_blocking=True)
        self.logits.copy_(logits, non_blocking=True)
        temperatures = torch.tensor([seq.sampling.temperature for seq in seqs])
        self.temperatures.view(-1).copy_(temperatures, non_blocking=True)
        uniforms = [seq.verify_uniforms(self.uniforms.shape[1]) for seq in seqs]
        self.uniforms.copy_(torch.stack(uniforms), non_blocking=True)

    def verify(self, rule: AcceptanceRule) -> Tensor:
        """Accepted count, next token and the draft tokens of each sequence: int64 [num_seqs, 2 + k]"""
        assert rule.on_device is not None
        target = torch.softmax(self.logits / self.temperatures, dim=-1)
        result = rule.on_device(self.draft_tokens, self.q, target, self.uniforms)
        return torch.cat([torch.stack([result.counts, result.tokens], dim=1), self.draft_tokens], dim=1)


def can_verify_on_device(seqs: list[Sequence], trees: list[DraftTree], output: ModelOutput) -> bool:
    """Whether all sequences are sampled by temperature alone under one rule, with chains of one length drawn there."""
    if not seqs or not output.logits.is_cuda:
        return False
    rule, size = seqs[0].params.rule, len(trees[0])
    if rule.on_device is None:
        return False
    for seq, tree in zip(seqs, trees):
        if seq.params.rule is not rule or not seq.sampling.plainly_drawn or seq.params.reads_paths:
            return False
        if len(tree) != size or tree.probes or not tree.is_chain or (size > 0 and tree.probs is None):
            return False
    return True


class GraphVerifier:
    """Keeps one captured verification for every rule, number of sequences and number of draft tokens it has seen."""

    MAX_GRAPHS = 16  # beyond it the oldest goes

    def __init__(self, pool: GraphPool | None = None) -> None:
        """pool: captures verifications; by default a pool for the device of the logits."""
        self._pool = pool
        self._graphs: GraphCache[VerifyKey, VerifyBuffers, Tensor] | None = None
        self._shared = Scratch()

    def verify(self, seqs: list[Sequence], trees: list[DraftTree], output: ModelOutput) -> list[VerifyResult]:
        """One result a sequence, all under one rule. One copy to the host, for all of them."""
        logits = output.logits.view(len(seqs), len(trees[0]) + 1, -1)
        groups = [slice(start, start + SEQS_AT_ONCE) for start in range(0, len(seqs), SEQS_AT_ONCE)]
        rows = [self._verified(seqs[group], trees[group], logits[group]) for group in groups]
        return [
            VerifyResult(list(range(count)), token, tokens[:count])
            for count, token, *tokens in torch.cat(rows).tolist()
        ]

    def _verified(self, seqs: list[Sequence], trees: list[DraftTree], logits: Tensor) -> Tensor:
        key = VerifyKey(seqs[0].params.rule, len(seqs), len(trees[0]))
        graph = self._cache(logits.device).get(
            key,
            lambda: VerifyBuffers.allocate(key, logits, self._shared),
            lambda buffers: buffers.verify(key.rule),
        )
        graph.buffers.put(seqs, trees, logits)
        return graph.run().clone()  # the next group is verified in the same memory

    def _cache(self, device: torch.device) -> GraphCache[VerifyKey, VerifyBuffers, Tensor]:
        if self._graphs is None:
            self._graphs = GraphCache(self._pool or GraphPool("verification", device), self.MAX_GRAPHS)
        return self._graphs
