"""How good a drafter is on sequences that exist already: steps are counted without running the target."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from paceline.core.stats import SpecStats
from paceline.train.corpus import TrainingBatch
from paceline.train.placement import autocast
from paceline.train.task import TrainingTask


def accepted_lengths(draft_tokens: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
    """int64 [batch, length]: with tokens up to t + 1 given, how many draft tokens in a row equal the sequence."""
    length, k = tokens.shape[1], draft_tokens.shape[-1]
    positions = torch.arange(length, device=tokens.device)[:, None] + 2 + torch.arange(k, device=tokens.device)
    actual = tokens[:, positions.clamp(max=length - 1)]  # [batch, length, k]
    inside = positions[None] < lengths[:, None, None]
    return ((draft_tokens == actual) & inside).long().cumprod(dim=-1).sum(dim=-1)


def count_steps(accepted: list[int], start: int, length: int, k: int) -> SpecStats:
    """The steps greedy decoding takes over one answer, the first of them right after the prompt."""
    stats = SpecStats(offered_at=[0] * k, accepted_at=[0] * k)
    position = max(start, 2)  # with less than two tokens nothing can be drafted
    while position < length:
        offered = min(k, length - position)
        num_accepted = min(accepted[position - 2], offered)
        new_tokens = min(num_accepted + 1, length - position)
        stats.steps += 1
        stats.new_tokens += new_tokens
        stats.drafted += offered
        stats.accepted += num_accepted
        for depth in range(offered):
            stats.offered_at[depth] += 1
            stats.accepted_at[depth] += depth < num_accepted
        position += new_tokens
    return stats


def measure(task: TrainingTask, batches: Iterable[TrainingBatch], k: int | None = None) -> SpecStats:
    """All steps over all answers of these batches."""
    device = next(task.module.parameters()).device
    total = SpecStats()
    for batch in batches:
        on_device = batch.to(device)
        with torch.no_grad(), autocast(device):
            draft_tokens = task.draft_tokens(on_device)[..., :k]
        accepted = accepted_lengths(draft_tokens, on_device.tokens, on_device.lengths).tolist()
        for row, start, length in zip(accepted, batch.starts.tolist(), batch.lengths.tolist()):
            total.add(count_steps(row, start, length, draft_tokens.shape[-1]))
    return total
