"""How many draft tokens of a head would have been accepted in sequences that exist already."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.train.corpus import BatchSampler, Corpus
from paceline.train.measure import accepted_lengths
from paceline.train.placement import autocast
from paceline.train.task import TrainingTask


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """Accepted draft tokens of each sequence, a step beginning at every token of its answer, and acceptance at
    position 1 over all of them."""

    accepted: tuple[int, ...]
    first_token_rate: float


@torch.no_grad()
def replay(task: TrainingTask, corpus: Corpus, batch_tokens: int) -> ReplayResult:
    """The batches depend on the corpus alone, so that two heads are compared sequence by sequence."""
    device = next(task.module.parameters()).device
    accepted: list[int] = []
    first_accepted = offered = 0
    for batch in BatchSampler(corpus, batch_tokens, 0).once():
        on_device = batch.to(device)
        with autocast(device):
            draft_tokens = task.draft_tokens(on_device)
        lengths = accepted_lengths(draft_tokens, on_device.tokens, on_device.lengths)
        answers = on_device.answers(2)  # a draft at t is of token t + 2
        accepted += (lengths * answers).sum(dim=1).tolist()
        first_accepted += int(((lengths > 0) & answers).sum())
        offered += int(answers.sum())
    return ReplayResult(tuple(accepted), first_accepted / max(1, offered))
