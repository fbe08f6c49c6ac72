"""Losses have their minimum at the target, and the sliced sum equals the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.train.losses import TeacherTargets, blend, in_slices, soft_loss


def rows(seed: int, count: int = 7, size: int = 5) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_soft_loss_is_the_entropy_where_the_drafter_equals_the_target_and_larger_elsewhere() -> None:
    probs = rows(0).softmax(dim=-1)
    entropy = -(probs * probs.log()).sum(dim=-1)
    assert torch.allclose(soft_loss(probs.log(), probs).double(), entropy, atol=1e-6)
    assert (soft_loss(rows(1), probs) > soft_loss(probs.log(), probs)).all()


def test_a_blend_weighs_the_distribution_and_the_likeliest_token() -> None:
    targets = TeacherTargets(torch.tensor([[0.5, 0.2], [0.1, 0.3]]), torch.tensor([0, -1]))
    labels = blend(targets, 0.25)
    assert torch.allclose(labels, torch.tensor([[0.75 * 0.5 + 0.25, 0.15], [0.075, 0.225]]))
    assert torch.allclose(blend(targets, 0.0), targets.probs)


def test_slices_sum_to_the_reference_with_the_same_gradients() -> None:
    weight = rows(2, 5, 5).requires_grad_()
    states, probs = rows(3).requires_grad_(), rows(4).softmax(dim=-1)

    def loss(hidden: Tensor, labels: Tensor) -> Tensor:
        return soft_loss(hidden @ weight, labels).sum()

    reference = loss(states, probs)
    expected = torch.autograd.grad(reference, (weight, states))
    for size in (1, 3, 7, 100):
        sliced = in_slices(loss, states, probs, rows=size)
        gradients = torch.autograd.grad(sliced, (weight, states))
        assert torch.allclose(sliced, reference, rtol=1e-5)
        assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(gradients, expected))


def test_no_rows_are_no_loss() -> None:
    empty = torch.zeros(0, 5, requires_grad=True)
    assert in_slices(lambda part: part.sum(), empty).item() == 0.0
