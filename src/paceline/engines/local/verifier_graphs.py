"""Acceptance on the device, for a batch of sampled sequences whose draft tokens were drawn there.

The rules are core's `verify_chains` and `verify_chains_coupled`, the vectorised twins of `accept` and `verify_coupled`; here they
are only fed and, on CUDA, captured as a graph: the host uploads temperatures and random numbers, and reads back one row
of integers a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.draft_tree import DraftTree
from paceline.core.sequence import Sequence
from paceline.core.types import ModelOutput, VerifyResult
from paceline.core.verify import COUPLED, draw_uniforms, verify_chains, verify_chains_coupled
from paceline.device.graphs import Capture, keep_newest
from paceline.device.scratch import Scratch

DEVICE_RULES = frozenset({"token", COUPLED})  # that have a twin for the device
TOGETHER = 8  # sequences judged at once: the distributions of a large batch take hundreds of megabytes


@dataclass(frozen=True, slots=True)
class Key:
    """What a judgement is captured for."""

    rule: str
    seqs: int
    draft_tokens: int


@dataclass(slots=True, eq=False)
class _Prepared:
    """The fixed tensors of one captured judgement. What is to be judged is copied into them, from wherever it lies.

    The large ones lie where those of every other judgement lie: a verify result is read before the next begins.
    """

    draft_tokens: Tensor  # int64 [sequences, k]
    q: Tensor  # float32 [sequences, k, vocab]
    logits: Tensor  # float32 [sequences, k + 1, vocab]
    temperatures: Tensor  # float32 [sequences, 1, 1]
    uniforms: Tensor  # float64 [sequences, k + 1]
    run: Callable[[], Tensor] = field(init=False)

    @classmethod
    def empty(cls, seqs: int, k: int, like: Tensor, shared: Scratch) -> _Prepared:
        """For so many sequences with k draft tokens each, and logits over this vocabulary."""
        vocab, device = like.shape[-1], like.device
        rows = shared.of((seqs, 2 * k + 1, vocab), device)
        return cls(
            torch.zeros(seqs, k, dtype=torch.int64, device=device),
            rows[:, :k],
            rows[:, k:],
            torch.ones(seqs, 1, 1, device=device),
            torch.zeros(seqs, k + 1, dtype=torch.float64, device=device),
        )

    def put(self, seqs: list[Sequence], trees: list[DraftTree], logits: Tensor, uniforms: list[Tensor]) -> None:
        if self.draft_tokens.shape[1]:
            self.draft_tokens.copy_(torch.stack([tree.tokens for tree in trees]), non_blocking=True)
            self.q.copy_(torch.stack([tree.probs for tree in trees if tree.probs is not None]), non_blocking=True)
        self.logits.copy_(logits, non_blocking=True)
        temperatures = torch.tensor([seq.sampling.temperature for seq in seqs])
        self.temperatures.view(-1).copy_(temperatures, non_blocking=True)
        self.uniforms.copy_(torch.stack(uniforms), non_blocking=True)

    def judged(self, rule: str) -> Tensor:
        """How many draft tokens of each sequence stand, and its next token: int64 [sequences, 2]"""
        target = torch.softmax(self.logits / self.temperatures, dim=-1)
        if rule == COUPLED:
            found = verify_chains_coupled(self.draft_tokens, target, self.uniforms)
        else:
            found = verify_chains(self.draft_tokens, self.q, target, self.uniforms)
        return torch.stack([found.counts, found.tokens], dim=1)


def can_judge(seqs: list[Sequence], trees: list[DraftTree], outputs: ModelOutput) -> bool:
    """Whether all sequences are sampled by temperature alone and carry chains of one length, drawn on the device."""
    if not outputs.logits.is_cuda or not seqs:
        return False
    size = len(trees[0])
    for seq, tree in zip(seqs, trees):
        if not seq.sampling.plainly_drawn or seq.constraint is not None:
            return False
        if len(tree) != size or tree.probes or not tree.is_chain or (size > 0 and tree.probs is None):
            return False
    return True


Work = Callable[[], Tensor]


class GraphVerifier:
    """Keeps one captured judgement for every rule, number of sequences and number of draft tokens it has seen."""

    LARGEST = 16  # kept; beyond it the oldest go

    def __init__(self, capture: Callable[[Work], Work] | None = None) -> None:
        """capture: turns work on fixed tensors into a call that repeats it; by default a CUDA graph."""
        self._capture = capture or Capture("acceptance")
        self._prepared: dict[Key, _Prepared] = {}
        self._shared = Scratch()

    def verified_rows(self, rule: str, seqs: list[Sequence], trees: list[DraftTree], outputs: ModelOutput) -> list[VerifyResult]:
        """One verify result a sequence, by one of DEVICE_RULES. The host waits once, for all of them."""
        logits = outputs.logits.view(len(seqs), len(trees[0]) + 1, -1)
        groups = [slice(start, start + TOGETHER) for start in range(0, len(seqs), TOGETHER)]
        found = [self._judged(rule, seqs[some], trees[some], logits[some]) for some in groups]
        return [VerifyResult(list(range(count)), token) for count, token in torch.cat(found).tolist()]

    def _judged(self, rule: str, seqs: list[Sequence], trees: list[DraftTree], logits: Tensor) -> Tensor:
        prepared = self._for(Key(rule, len(seqs), len(trees[0])), logits)
        prepared.put(seqs, trees, logits, [chances_of(seq, tree, rule) for seq, tree in zip(seqs, trees)])
        return prepared.run().clone()  # the next group is judged in the same place

    def _for(self, key: Key, logits: Tensor) -> _Prepared:
        if key not in self._prepared:
            made = _Prepared.empty(key.seqs, key.draft_tokens, logits, self._shared)
            made.run = self._capture(lambda: made.judged(key.rule))
            keep_newest(self._prepared, key, made, self.LARGEST)
        return self._prepared[key]


def chances_of(seq: Sequence, tree: DraftTree, rule: str) -> Tensor:
    """The numbers a sequence is judged with: one a draft token and one for the target's own token. float64 [draft tokens + 1]"""
    return seq.seeded_uniforms(0, tree.num_draft_tokens + 1) if rule == COUPLED else draw_uniforms(tree, seq.rng)
