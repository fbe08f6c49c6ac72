"""The loss of block drafters against plain sums in float64, and greedy drafts as the selector walks them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.heads.dflash import DFlashHead
from paceline.train import block_loss
from paceline.train.block_loss import BlockLoss, TrainedRows, drafts_of, position_weights
from paceline.train.losses import TeacherTargets
from tests.heads.dflash_reference import random_head

ROWS, LABELS = 12, 5
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}


def head_of(**options: object) -> DFlashHead:
    return random_head(draft_vocab_size=20, **options).double()


def targets_of(head: DFlashHead) -> TeacherTargets:
    """Predictions that the drafter covers in part; one likeliest token it does not have."""
    probs = torch.rand(LABELS, head.config.draft_vocab_size, dtype=torch.float64)
    best = probs.argmax(dim=-1)
    best[2] = -1
    return TeacherTargets(0.8 * probs / probs.sum(dim=-1, keepdim=True), best)


def rows_of(head: DFlashHead) -> TrainedRows:
    states = torch.randn(ROWS, head.config.hidden_size, dtype=torch.float64)
    before = torch.randint(0, head.config.vocab_size, (ROWS,))
    return TrainedRows(states, torch.randint(0, LABELS, (ROWS,)), before, torch.rand(ROWS, dtype=torch.float64))


def plain_row(head: DFlashHead, targets: TeacherTargets, greedy_weight: float, rows: TrainedRows, index: int) -> float:
    """One row: -Σ label·log q, and with a selector the cross entropy among the candidates."""
    logits, best = head.logits(rows.states[index]), int(targets.best[rows.label[index]])
    log_q = torch.log_softmax(logits, dim=-1)
    loss = -(1 - greedy_weight) * float((targets.probs[rows.label[index]] * log_q).sum())
    loss -= greedy_weight * float(log_q[best]) if best >= 0 else 0.0
    selector = head.candidate_selector
    if selector is not None:
        ids = logits.topk(selector.top_k).indices.tolist()
        g = selector.hidden_projection(rows.states[index]) * selector.predecessor_codebook[rows.before[index]]
        scores = torch.stack([logits[id_] + g @ selector.successor_codebook[id_] for id_ in ids])
        if best in ids:
            loss -= float(torch.log_softmax(scores, dim=-1)[ids.index(best)])
    return loss


@pytest.mark.parametrize("options", [{}, SELECTOR], ids=["dflash", "dflash2"])
@pytest.mark.parametrize("values", [2**30, 60], ids=["at once", "in slices"])
def test_the_loss_is_the_weighted_mean_over_its_rows(
    options: dict[str, object], values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_loss, "VALUES_AT_A_TIME", values)
    torch.manual_seed(1)
    head = head_of(**options)
    targets, rows = targets_of(head), rows_of(head)
    plain = [plain_row(head, targets, 0.3, rows, index) for index in range(ROWS)]
    expected = sum(loss * float(weight) for loss, weight in zip(plain, rows.weight)) / float(rows.weight.sum())
    # Labels are kept in float32, whatever the states are.
    assert float(BlockLoss(head, targets, 0.3).mean(rows)) == pytest.approx(expected, rel=1e-5)


def test_later_rows_weigh_less() -> None:
    weights = position_weights(8, 4.0, torch.device("cpu"))
    assert weights.tolist() == pytest.approx([math.exp(-place / 4) for place in range(7)])


def test_every_weight_of_the_selector_gets_a_gradient() -> None:
    torch.manual_seed(2)
    head = head_of(**SELECTOR)
    head.requires_grad_(True)
    BlockLoss(head, targets_of(head), 0.5).mean(rows_of(head)).backward()
    assert head.candidate_selector is not None
    assert all(bool(weight.grad.any()) for weight in head.candidate_selector.parameters() if weight.grad is not None)
    assert all(weight.grad is not None for weight in head.candidate_selector.parameters())


def test_greedy_drafts_are_the_best_candidates_after_the_token_before() -> None:
    torch.manual_seed(3)
    plain, selecting = head_of(), head_of(**SELECTOR)
    rows = rows_of(plain)

    def chosen(head: DFlashHead, index: int) -> Tensor:
        logits = head.logits(rows.states[index])
        if head.candidate_selector is None:
            return head.to_target_ids(logits.argmax())
        candidates = head.candidate_selector.candidates(logits)
        scores = head.candidate_selector.pair_scores(rows.states[index], candidates, rows.before[index][None])
        return head.to_target_ids(candidates.ids[scores[0].argmax()])

    for head in (plain, selecting):
        expected = torch.stack([chosen(head, index) for index in range(ROWS)])
        assert torch.equal(drafts_of(head, rows.states, rows.before), expected)
    assert not torch.equal(drafts_of(plain, rows.states, rows.before), drafts_of(selecting, rows.states, rows.before))
