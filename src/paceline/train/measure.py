"""How good a drafter is on texts that are there already: rounds walked through without running the target."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from paceline.core.tally import Tally
from paceline.train.corpus import Batch
from paceline.train.task import Task


def accepted_lengths(guesses: Tensor, tokens: Tensor, lengths: Tensor) -> Tensor:
    """int64 [batch, width]: with tokens up to t + 1 known, how many guesses in a row equal the text."""
    width, k = tokens.shape[1], guesses.shape[-1]
    places = torch.arange(width, device=tokens.device)[:, None] + 2 + torch.arange(k, device=tokens.device)
    truth = tokens[:, places.clamp(max=width - 1)]  # [batch, width, k]
    inside = places[None] < lengths[:, None, None]
    return ((guesses == truth) & inside).long().cumprod(dim=-1).sum(dim=-1)


def walk(accepted: list[int], start: int, length: int, k: int) -> Tally:
    """The rounds greedy decoding would have had over one answer, the first of them right after the prompt."""
    tally = Tally(offered_at=[0] * k, accepted_at=[0] * k)
    known = max(start, 2)  # with less than two tokens nothing can be guessed
    while known < length:
        offered = min(k, length - known)
        stood = min(accepted[known - 2], offered)
        new = min(stood + 1, length - known)
        tally.steps += 1
        tally.new_tokens += new
        tally.drafted += offered
        tally.accepted += stood
        for depth in range(offered):
            tally.offered_at[depth] += 1
            tally.accepted_at[depth] += depth < stood
        known += new
    return tally


def measure(task: Task, batches: Iterable[Batch], k: int | None = None) -> Tally:
    """All rounds over all answers of these batches."""
    device = next(task.module.parameters()).device
    total = Tally()
    for batch in batches:
        here = batch.to(device)
        with torch.no_grad(), autocast(device):
            guesses = task.guesses(here)[..., :k]
        accepted = accepted_lengths(guesses, here.tokens, here.lengths).tolist()
        for row, start, length in zip(accepted, batch.starts.tolist(), batch.lengths.tolist()):
            total.add(walk(row, start, length, guesses.shape[-1]))
    return total


def autocast(device: torch.device) -> torch.autocast:
    """bf16 on a GPU; a CPU computes in the weights' own fp32."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")
