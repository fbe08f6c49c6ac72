"""How good a drafter is on texts that are there already: rounds walked through without running the target."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from paceline.core.stats import SpecStats
from paceline.train.corpus import Batch
from paceline.train.task import Task


def accepted_lengths(draft_tokens: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
    """int64 [batch, width]: with tokens up to t + 1 known, how many guesses in a row equal the text."""
    width, k = tokens.shape[1], draft_tokens.shape[-1]
    places = torch.arange(width, device=tokens.device)[:, None] + 2 + torch.arange(k, device=tokens.device)
    truth = tokens[:, places.clamp(max=width - 1)]  # [batch, width, k]
    inside = places[None] < lengths[:, None, None]
    return ((draft_tokens == truth) & inside).long().cumprod(dim=-1).sum(dim=-1)


def walk(accepted: list[int], start: int, length: int, k: int) -> SpecStats:
    """The rounds greedy decoding would have had over one answer, the first of them right after the prompt."""
    stats = SpecStats(offered_at=[0] * k, accepted_at=[0] * k)
    known = max(start, 2)  # with less than two tokens nothing can be guessed
    while known < length:
        offered = min(k, length - known)
        stood = min(accepted[known - 2], offered)
        new = min(stood + 1, length - known)
        stats.steps += 1
        stats.new_tokens += new
        stats.drafted += offered
        stats.accepted += stood
        for depth in range(offered):
            stats.offered_at[depth] += 1
            stats.accepted_at[depth] += depth < stood
        known += new
    return stats


def measure(task: Task, batches: Iterable[Batch], k: int | None = None) -> SpecStats:
    """All rounds over all answers of these batches."""
    device = next(task.module.parameters()).device
    total = SpecStats()
    for batch in batches:
        here = batch.to(device)
        with torch.no_grad(), autocast(device):
            draft_tokens = task.draft_tokens(here)[..., :k]
        accepted = accepted_lengths(draft_tokens, here.tokens, here.lengths).tolist()
        for row, start, length in zip(accepted, batch.starts.tolist(), batch.lengths.tolist()):
            total.add(walk(row, start, length, draft_tokens.shape[-1]))
    return total


def autocast(device: torch.device) -> torch.autocast:
    """bf16 on a GPU; a CPU computes in the weights' own fp32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")
