"""The fast unrolling equals the reference."""

from __future__ import annotations

import pytest
import torch

from paceline.heads.eagle3 import Eagle3Config, Eagle3Head
from paceline.train.training_time_test import reference, unroll

STEPS = 4


def head(norm_before_residual: bool) -> Eagle3Head:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        config = Eagle3Config(16, 24, 4, 2, 4, 40, 20, 16, norm_before_residual=norm_before_residual)
        module = Eagle3Head(config)
        table = torch.randn(40, 16)
    module.bind_target(lambda tokens: table[tokens], lambda states: states @ table.T)
    return module


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_unroll_equals_the_reference_in_values_and_gradients(norm_before_residual: bool) -> None:
    module = head(norm_before_residual)
    rng = torch.Generator().manual_seed(6)
    features = torch.randn(2, 9, 48, generator=rng)
    tokens = torch.randint(0, 40, (2, 9), generator=rng)
    weights = list(module.parameters())
    states, gradients = [], []
    for implementation in (reference, unroll):
        outs = list(implementation(module, features, tokens, STEPS))
        states.append(outs)
        gradients.append(torch.autograd.grad(sum(out.square().mean() for out in outs), weights, allow_unused=True))
    assert len(states[0]) == len(states[1]) == STEPS
    for expected, actual in zip(*states):
        assert torch.allclose(expected, actual, atol=1e-5)
    for expected, actual in zip(*gradients):
        assert (expected is None) == (actual is None)
        assert expected is None or torch.allclose(expected, actual, atol=1e-5)


def test_a_later_step_sees_only_its_own_chain() -> None:
    """Changing the token at position 6 changes step 2 at positions that read it, and nowhere else."""
    module = head(False)
    features = torch.randn(1, 9, 48, generator=torch.Generator().manual_seed(7))
    tokens = torch.arange(9)[None]
    changed = tokens.clone()
    changed[0, 6] = 33
    second = [list(unroll(module, features, ids, 2))[1] for ids in (tokens, changed)]
    differs = (second[0] - second[1]).abs().amax(dim=-1)[0] > 1e-6
    assert differs.tolist() == [position + 2 >= 6 for position in range(9)]
