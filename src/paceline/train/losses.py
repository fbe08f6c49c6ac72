"""Losses, written to be read. They take flat rows: [rows, draft vocabulary]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

ROWS_AT_A_TIME = 2048  # rows whose logits are held at once by in_slices


@dataclass(frozen=True, slots=True, eq=False)
class TeacherTargets:
    """What the target says at some places of the text.

    probs  [rows, draft vocabulary]: the target's probabilities of the tokens the drafter can say. They are normalised
           over the target's whole vocabulary, so a row sums to less than one where the target means something else
    best   int64 [rows]: the target's likeliest token in the drafter's own numbering; -1: the drafter cannot say it
    """

    probs: Tensor
    best: Tensor


def blend(lesson: TeacherTargets, greedy: float) -> Tensor:
    """What a row is to say: the target's distribution and, with weight `greedy`, its likeliest token alone.

    Sampled decoding accepts with Σ min(p, q) and wants the first; greedy decoding compares argmaxes and wants the
    second.
    """
    known = (lesson.best >= 0).float() * greedy
    wanted = lesson.probs.float() * (1.0 - greedy)
    return wanted.scatter_add_(-1, lesson.best.clamp(min=0)[:, None], known[:, None])


def soft_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    """Cross entropy -Σ p·log q of every row, minimal where q is p. A row weighs what the drafter can cover of it."""
    return -(wanted * functional.log_softmax(logits.float(), dim=-1)).sum(dim=-1)


def divergence(logits: Tensor, probs: Tensor) -> Tensor:
    """KL(p || q) of every row: the soft loss less what no drafter can avoid."""
    kept = probs.float()
    unavoidable: Tensor = torch.special.xlogy(kept, kept).sum(dim=-1)
    return soft_loss(logits, kept) + unavoidable


def in_slices(loss: Callable[..., Tensor], *columns: Tensor, rows: int = ROWS_AT_A_TIME) -> Tensor:
    """loss(*columns), a sum over rows, a slice at a time: equal to the sum over all rows at once, the reference.

    What a slice computes is thrown away and computed again on the way back, so that the logits of a whole batch over
    a whole vocabulary never exist.
    """
    parts = zip(*(torch.split(column, rows) for column in columns))
    sums: list[Tensor] = [checkpoint(loss, *part, use_reentrant=False) for part in parts]
    return torch.stack(sums).sum()
