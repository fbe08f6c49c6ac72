"""Acceptance on the device, for a batch of sampled texts whose guesses were drawn there.

The rules are core's `accept_chains` and `couple_chains`, the vectorised twins of `accept` and `walk_coupled`; here they
are only fed and, on CUDA, captured as a graph: the host uploads temperatures and random numbers, and reads back one row
of integers a text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.acceptance import COUPLED, accept_chains, couple_chains, uniforms
from paceline.core.graphs import Capture, keep_newest
from paceline.core.protocols import Outputs, Verdict
from paceline.core.scratch import Scratch
from paceline.core.sequence import Sequence
from paceline.core.tree import DraftTree

DEVICE_RULES = frozenset({"token", COUPLED})  # that have a twin for the device
TOGETHER = 8  # texts judged at once: the distributions of a large batch take hundreds of megabytes


@dataclass(frozen=True, slots=True)
class Key:
    """What a judgement is captured for."""

    rule: str
    texts: int
    guesses: int


@dataclass(slots=True, eq=False)
class _Prepared:
    """The fixed tensors of one captured judgement. What is to be judged is copied into them, from wherever it lies.

    The large ones lie where those of every other judgement lie: a verdict is read before the next begins.
    """

    guesses: Tensor  # int64 [texts, k]
    q: Tensor  # float32 [texts, k, vocab]
    logits: Tensor  # float32 [texts, k + 1, vocab]
    temperatures: Tensor  # float32 [texts, 1, 1]
    chances: Tensor  # float64 [texts, k + 1]
    run: Callable[[], Tensor] = field(init=False)

    @classmethod
    def empty(cls, texts: int, k: int, like: Tensor, shared: Scratch) -> _Prepared:
        """For so many texts with k guesses each, and logits over this vocabulary."""
        vocab, device = like.shape[-1], like.device
        rows = shared.of((texts, 2 * k + 1, vocab), device)
        return cls(
            torch.zeros(texts, k, dtype=torch.int64, device=device),
            rows[:, :k],
            rows[:, k:],
            torch.ones(texts, 1, 1, device=device),
            torch.zeros(texts, k + 1, dtype=torch.float64, device=device),
        )

    def put(self, texts: list[Sequence], trees: list[DraftTree], logits: Tensor, chances: list[Tensor]) -> None:
        if self.guesses.shape[1]:
            self.guesses.copy_(torch.stack([tree.tokens for tree in trees]), non_blocking=True)
            self.q.copy_(torch.stack([tree.probs for tree in trees if tree.probs is not None]), non_blocking=True)
        self.logits.copy_(logits, non_blocking=True)
        temperatures = torch.tensor([text.sampling.temperature for text in texts])
        self.temperatures.view(-1).copy_(temperatures, non_blocking=True)
        self.chances.copy_(torch.stack(chances), non_blocking=True)

    def judged(self, rule: str) -> Tensor:
        """How many guesses of each text stand, and its next token: int64 [texts, 2]"""
        target = torch.softmax(self.logits / self.temperatures, dim=-1)
        if rule == COUPLED:
            found = couple_chains(self.guesses, target, self.chances)
        else:
            found = accept_chains(self.guesses, self.q, target, self.chances)
        return torch.stack([found.counts, found.tokens], dim=1)


def can_judge(texts: list[Sequence], trees: list[DraftTree], outputs: Outputs) -> bool:
    """Whether all texts are sampled by temperature alone and carry chains of one length, drawn on the device."""
    if not outputs.logits.is_cuda or not texts:
        return False
    size = len(trees[0])
    for text, tree in zip(texts, trees):
        if not text.sampling.plainly_drawn or text.constraint is not None:
            return False
        if len(tree) != size or tree.probes or not tree.is_chain or (size > 0 and tree.probs is None):
            return False
    return True


Work = Callable[[], Tensor]


class DeviceJudge:
    """Keeps one captured judgement for every rule, number of texts and number of guesses it has seen."""

    LARGEST = 16  # kept; beyond it the oldest go

    def __init__(self, capture: Callable[[Work], Work] | None = None) -> None:
        """capture: turns work on fixed tensors into a call that repeats it; by default a CUDA graph."""
        self._capture = capture or Capture("acceptance")
        self._prepared: dict[Key, _Prepared] = {}
        self._shared = Scratch()

    def verdicts(self, rule: str, texts: list[Sequence], trees: list[DraftTree], outputs: Outputs) -> list[Verdict]:
        """One verdict a text, by one of DEVICE_RULES. The host waits once, for all of them."""
        logits = outputs.logits.view(len(texts), len(trees[0]) + 1, -1)
        groups = [slice(start, start + TOGETHER) for start in range(0, len(texts), TOGETHER)]
        found = [self._judged(rule, texts[some], trees[some], logits[some]) for some in groups]
        return [Verdict(list(range(count)), token) for count, token in torch.cat(found).tolist()]

    def _judged(self, rule: str, texts: list[Sequence], trees: list[DraftTree], logits: Tensor) -> Tensor:
        prepared = self._for(Key(rule, len(texts), len(trees[0])), logits)
        prepared.put(texts, trees, logits, [chances_of(text, tree, rule) for text, tree in zip(texts, trees)])
        return prepared.run().clone()  # the next group is judged in the same place

    def _for(self, key: Key, logits: Tensor) -> _Prepared:
        if key not in self._prepared:
            made = _Prepared.empty(key.texts, key.guesses, logits, self._shared)
            made.run = self._capture(lambda: made.judged(key.rule))
            keep_newest(self._prepared, key, made, self.LARGEST)
        return self._prepared[key]


def chances_of(text: Sequence, tree: DraftTree, rule: str) -> Tensor:
    """The numbers a text is judged with: one a guess and one for the target's own token. float64 [guesses + 1]"""
    return text.own_chances(0, tree.guesses + 1) if rule == COUPLED else uniforms(tree, text.rng)
