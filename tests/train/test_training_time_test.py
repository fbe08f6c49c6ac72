"""The fast unrolling is the one that is written to be read."""

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
        made = Eagle3Head(config)
        table = torch.randn(40, 16)
    made.bind_target(lambda tokens: table[tokens], lambda states: states @ table.T)
    return made


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_unroll_equals_the_reference_in_values_and_gradients(norm_before_residual: bool) -> None:
    made = head(norm_before_residual)
    rng = torch.Generator().manual_seed(6)
    features = torch.randn(2, 9, 48, generator=rng)
    tokens = torch.randint(0, 40, (2, 9), generator=rng)
    weights = list(made.parameters())
    found, gradients = [], []
    for way in (reference, unroll):
        outs = list(way(made, features, tokens, STEPS))
        found.append(outs)
        gradients.append(torch.autograd.grad(sum(out.square().mean() for out in outs), weights, allow_unused=True))
    assert len(found[0]) == len(found[1]) == STEPS
    for one, other in zip(*found):
        assert torch.allclose(one, other, atol=1e-5)
    for one, other in zip(*gradients):
        assert (one is None) == (other is None)
        assert one is None or torch.allclose(one, other, atol=1e-5)


def test_a_later_step_sees_only_its_own_chain() -> None:
    """Changing the token at place 6 changes what step 2 says at places that know it, and nowhere else."""
    made = head(False)
    features = torch.randn(1, 9, 48, generator=torch.Generator().manual_seed(7))
    tokens = torch.arange(9)[None]
    changed = tokens.clone()
    changed[0, 6] = 33
    second = [list(unroll(made, features, text, 2))[1] for text in (tokens, changed)]
    differs = (second[0] - second[1]).abs().amax(dim=-1)[0] > 1e-6
    assert differs.tolist() == [place + 2 >= 6 for place in range(9)]
