"""Losses over flat rows [rows, draft_vocab_size], in their readable form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

ROWS_AT_A_TIME = 2048  # rows whose logits in_slices holds at once


@dataclass(frozen=True, slots=True, eq=False)
class TeacherTargets:
    """What the target predicts at some positions of the batch.

    probs  [rows, draft_vocab_size]: the target's probabilities of the drafter's tokens. They are normalised over the
           target's whole vocabulary, so a row sums to less than one where the target prefers other tokens
    best   int64 [rows]: the target's likeliest token as the drafter's id; -1: the drafter does not have it
    """

    probs: Tensor
    best: Tensor


def blend(targets: TeacherTargets, greedy_weight: float) -> Tensor:
    """The label of each row: the target's distribution and, with weight `greedy_weight`, its likeliest token alone.

    Sampled decoding accepts with Σ min(p, q) and gains from the first; greedy decoding compares argmaxes and gains
    from the second.
    """
    best_weight = (targets.best >= 0).float() * greedy_weight
    labels = targets.probs.float() * (1.0 - greedy_weight)
    return labels.scatter_add_(-1, targets.best.clamp(min=0)[:, None], best_weight[:, None])


def soft_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy -Σ p·log q of every row, minimal where q is p. A row weighs what the drafter can cover of it."""
    return -(labels * functional.log_softmax(logits.float(), dim=-1)).sum(dim=-1)


def in_slices(loss: Callable[..., Tensor], *columns: Tensor, rows: int = ROWS_AT_A_TIME) -> Tensor:
    """loss(*columns), a sum over rows, a slice at a time: equal to the sum over all rows at once, the reference.

    A slice is computed again in the backward pass, so the logits of a whole batch over a whole vocabulary never exist.
    Where one slice holds everything, nothing is computed twice.
    """
    if len(columns[0]) <= rows:
        return loss(*columns)
    slices = zip(*(torch.split(column, rows) for column in columns))
    sums: list[Tensor] = [checkpoint(loss, *part, use_reentrant=False) for part in slices]
    return torch.stack(sums).sum()
