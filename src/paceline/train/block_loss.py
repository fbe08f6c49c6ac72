"""The loss of the drafting rows of many blocks: each against the target's prediction, DFlash 2 with its selector."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.heads.candidate_selector import CandidateSelector
from paceline.heads.dflash import DFlashHead
from paceline.train.losses import TeacherTargets, blend, in_slices, soft_loss

VALUES_AT_A_TIME = 2**30  # logits that exist at once


@dataclass(frozen=True, slots=True, eq=False)
class TrainedRows:
    """Drafting rows, each with what it should predict.

    states  [rows, hidden_size] of the head
    label   int64 [rows]: the row of the target's predictions
    before  int64 [rows]: the token before, an id of the target
    weight  [rows]
    """

    states: Tensor
    label: Tensor
    before: Tensor
    weight: Tensor


def position_weights(block_size: int, decay: float, device: torch.device) -> Tensor:
    """exp(-(k - 1) / decay) of drafting row k: a draft token only counts where all before it are accepted."""
    return torch.exp(-torch.arange(block_size - 1, device=device) / decay)


@dataclass(frozen=True, slots=True, eq=False)
class BlockLoss:
    """Cross entropy to a blend of the target's distribution and its likeliest token; plus that of the selector."""

    head: DFlashHead
    targets: TeacherTargets
    greedy_weight: float
    selector_weight: float = 1.0

    def mean(self, rows: TrainedRows) -> Tensor:
        """Weighted mean over the rows."""
        columns = (rows.states, rows.label, rows.before, rows.weight)
        rows_at_a_time = max(1, VALUES_AT_A_TIME // self.head.config.draft_vocab_size)
        return in_slices(self._sum, *columns, rows=rows_at_a_time) / rows.weight.sum().clamp(min=1e-6)

    def _sum(self, states: Tensor, label: Tensor, before: Tensor, weight: Tensor) -> Tensor:
        logits, best = self.head.logits(states), self.targets.best[label]
        labels = blend(TeacherTargets(self.targets.probs[label], best), self.greedy_weight)
        losses = soft_loss(logits, labels)
        selector = self.head.candidate_selector
        if selector is not None:
            losses = losses + self.selector_weight * selector_loss(selector, states, logits, before, best)
        return (losses * weight).sum()


def selector_loss(selector: CandidateSelector, states: Tensor, logits: Tensor, before: Tensor, best: Tensor) -> Tensor:
    """Cross entropy over the candidates, scored after the true token before; 0 where the label is no candidate."""
    candidates = selector.candidates(logits)
    scores = selector.pair_scores(states, candidates, before[:, None]).squeeze(-2).float()
    is_label = candidates.ids == best[:, None]
    losses = scores.logsumexp(dim=-1) - (scores * is_label).sum(dim=-1)
    return losses * is_label.any(dim=-1)


def drafts_of(head: DFlashHead, states: Tensor, before: Tensor) -> Tensor:
    """The token of each row as greedy drafting chooses it after the token before; ids of the target."""
    logits, selector = head.logits(states), head.candidate_selector
    if selector is None:
        return head.to_target_ids(logits.argmax(dim=-1))
    candidates = selector.candidates(logits)
    best = selector.pair_scores(states, candidates, before[:, None]).squeeze(-2).argmax(dim=-1)
    return head.to_target_ids(candidates.ids.gather(-1, best[:, None]).squeeze(-1))
