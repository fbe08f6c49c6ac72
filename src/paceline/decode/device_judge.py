"""Acceptance on the device, for a batch of sampled texts whose guesses were drawn there.

The rules are core's `accept_chains` and `couple_chains`, the vectorised twins of `accept` and `walk_coupled`; here they
are only fed and, on CUDA, captured as a graph: the host uploads temperatures and random numbers, and reads back one row
of integers a text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.acceptance import COUPLED, accept_chains, couple_chains, uniforms
from paceline.core.protocols import Outputs, Verdict
from paceline.core.sequence import Sequence
from paceline.core.tree import DraftTree

Key = tuple[str | int, ...]

DEVICE_RULES = frozenset({"token", COUPLED})  # that have a twin for the device


@dataclass(slots=True, eq=False)
class _Prepared:
    """Fixed tensors of one captured judgement."""

    temperatures: Tensor  # [texts, 1, 1]
    chances: Tensor  # float64 [texts, k + 1]
    run: Callable[[], Tensor]


def can_judge(texts: list[Sequence], trees: list[DraftTree], outputs: Outputs) -> bool:
    """Whether all texts are sampled by temperature alone and carry chains of one length, drawn on the device."""
    if not outputs.logits.is_cuda or not texts:
        return False
    size = len(trees[0])
    for text, tree in zip(texts, trees):
        sampling = text.sampling
        cut = sampling.top_k or sampling.top_p < 1 or sampling.min_p
        if sampling.greedy or cut or sampling.penalised or sampling.logit_bias or text.constraint is not None:
            return False
        if len(tree) != size or tree.probes or not tree.is_chain or (size > 0 and tree.probs is None):
            return False
    return True


class DeviceJudge:
    """Keeps one captured judgement for every set of tensors it has seen. Runners reuse theirs, so there are few."""

    LARGEST = 64  # kept; beyond it the oldest go

    def __init__(self) -> None:
        self._prepared: dict[Key, _Prepared] = {}

    def verdicts(self, rule: str, texts: list[Sequence], trees: list[DraftTree], outputs: Outputs) -> list[Verdict]:
        """One verdict a text, by one of DEVICE_RULES."""
        k = len(trees[0])
        guesses = _stacked([tree.tokens for tree in trees]) if k else outputs.logits.new_empty(len(texts), 0).long()
        q = _stacked([tree.probs for tree in trees if tree.probs is not None]) if k else None
        places = (guesses.data_ptr(), 0 if q is None else q.data_ptr()) if k else (0, 0)
        key = (rule, len(texts), k, outputs.logits.data_ptr(), *places)
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._prepare(key, rule, guesses, q, outputs.logits)
        chances = [chances_of(text, tree, rule) for text, tree in zip(texts, trees)]
        prepared.chances.copy_(torch.stack(chances), non_blocking=True)
        prepared.temperatures.view(-1).copy_(
            torch.tensor([text.sampling.temperature for text in texts]), non_blocking=True
        )
        return [Verdict(list(range(count)), token) for count, token in prepared.run().tolist()]

    def _prepare(self, key: Key, rule: str, guesses: Tensor, q: Tensor | None, logits: Tensor) -> _Prepared:
        from paceline.runners.native.graphs import Captured, new_pool

        texts, k = guesses.shape
        temperatures = torch.ones(texts, 1, 1, device=logits.device)
        chances = torch.zeros(texts, k + 1, dtype=torch.float64, device=logits.device)

        def work() -> Tensor:
            target = torch.softmax(logits.view(texts, k + 1, -1) / temperatures, dim=-1)
            if rule == COUPLED:
                found = couple_chains(guesses, target, chances)
            else:
                found = accept_chains(guesses, q, target, chances)
            return torch.stack([found.counts, found.tokens], dim=1)

        prepared = _Prepared(temperatures, chances, Captured(work, "acceptance", new_pool()))
        if len(self._prepared) >= self.LARGEST:
            self._prepared.pop(next(iter(self._prepared)))
        self._prepared[key] = prepared
        return prepared


def chances_of(text: Sequence, tree: DraftTree, rule: str) -> Tensor:
    """The numbers a text is judged with: one a guess and one for the target's own token. float64 [guesses + 1]"""
    return text.own_chances(0, tree.guesses + 1) if rule == COUPLED else uniforms(tree, text.rng)


def _stacked(parts: list[Tensor]) -> Tensor:
    """Rows of one tensor as that tensor, without copying: a copy would lie elsewhere every time."""
    base = parts[0]
    if len(parts) == 1:
        return base[None]
    step = parts[1].storage_offset() - base.storage_offset()
    for index, part in enumerate(parts):
        if part.untyped_storage().data_ptr() != base.untyped_storage().data_ptr():
            return torch.stack(parts)
        if part.storage_offset() != base.storage_offset() + index * step:
            return torch.stack(parts)
    return base.as_strided((len(parts), *base.shape), (step, *base.stride()))
