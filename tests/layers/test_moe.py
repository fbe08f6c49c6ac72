"""Mixtures of experts: the eager reference against its definition, and the kernels against the reference.

Without a GPU the kernels run through Triton's interpreter: the same code, slowly.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.layers.linear import UnquantizedLinear
from paceline.layers.moe import (
    ClampedSwiGlu,
    MixtureOfExperts,
    Router,
    RowByRowLinear,
    SharedExpert,
    StackedWeights,
    route,
    stacked_experts,
)

HIDDEN, SIZE, EXPERTS = 40, 24, 7  # no multiple of a tile's columns or steps
CLAMPED = ClampedSwiGlu(alpha=1.7, limit=0.8)


def mixture_of(
    top_k: int = 2,
    *,
    renormalize: bool = True,
    activation: ClampedSwiGlu | None = None,
    biases: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> MixtureOfExperts:
    def random(*shape: int) -> Tensor:
        return (torch.randn(shape) * 0.4).to(device, dtype)

    bias = (random(EXPERTS, 2 * SIZE), random(EXPERTS, HIDDEN)) if biases else (None, None)
    experts = stacked_experts(
        StackedWeights(random(EXPERTS, 2 * SIZE, HIDDEN), random(EXPERTS, HIDDEN, SIZE), *bias), activation
    )
    return MixtureOfExperts(Router(UnquantizedLinear(random(EXPERTS, HIDDEN)), top_k, renormalize), experts)


def by_definition(mixture: MixtureOfExperts, x: Tensor, logits: Tensor) -> Tensor:
    """Every expert over every row in float64, and the chosen ones weighted."""
    stacked, router = mixture.experts.stacked, mixture.router
    assert stacked is not None
    shares = logits.double().softmax(dim=-1)
    best = shares.topk(router.top_k, dim=-1)
    weights = torch.zeros_like(shares).scatter(1, best.indices, best.values)
    if router.renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(EXPERTS):
        both = x.double() @ stacked.gate_up[expert].double().T
        if stacked.gate_up_bias is not None:
            both = both + stacked.gate_up_bias[expert].double()
        gate, up = both.chunk(2, dim=-1)
        if mixture.experts.activation is None:
            activated = F.silu(gate) * up
        else:
            alpha, limit = mixture.experts.activation.alpha, mixture.experts.activation.limit
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            activated = gate / (1 + torch.exp(-alpha * gate)) * (up + 1)
        out = activated @ stacked.down[expert].double().T
        if stacked.down_bias is not None:
            out = out + stacked.down_bias[expert].double()
        total += weights[:, expert, None] * out
    return total


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("activation", "biases"), [(None, False), (CLAMPED, True)])
def test_the_reference_is_the_weighted_sum_of_the_chosen_experts(
    renormalize: bool, activation: ClampedSwiGlu | None, biases: bool
) -> None:
    mixture = mixture_of(3, renormalize=renormalize, activation=activation, biases=biases, dtype=torch.float64)
    x = torch.randn(9, HIDDEN, dtype=torch.float64)
    expected = by_definition(mixture, x, mixture.router.logits(x))
    torch.testing.assert_close(mixture(x), expected, rtol=1e-5, atol=1e-5)  # routers weigh in float32


def test_choosing_before_the_softmax_is_renormalising_after_it() -> None:
    logits, router = torch.randn(5, 16), Router(UnquantizedLinear(torch.zeros(16, 4)), 4)
    chosen = logits.topk(4, dim=-1)
    routing = route(logits, router)
    torch.testing.assert_close(routing.weights, chosen.values.softmax(dim=-1))
    assert torch.equal(routing.experts, chosen.indices)
    shares = logits.softmax(dim=-1).gather(1, chosen.indices)
    torch.testing.assert_close(route(logits, replace(router, renormalize=False)).weights, shares)
    torch.testing.assert_close(route(logits, replace(router, scale=2.5)).weights, 2.5 * routing.weights)


def test_a_shared_expert_counts_for_every_row_by_its_gate() -> None:
    mixture = mixture_of()
    shared = SharedExpert(
        UnquantizedLinear(torch.randn(2 * 8, HIDDEN)),
        UnquantizedLinear(torch.randn(HIDDEN, 8)),
        UnquantizedLinear(torch.randn(1, HIDDEN) * 0.1),
    )
    x = torch.randn(4, HIDDEN)
    gate, up = (x @ shared.gate_up.dequantize(x.dtype).T).chunk(2, dim=-1)
    expected = (F.silu(gate) * up) @ shared.down.dequantize(x.dtype).T
    assert shared.gate is not None
    expected = expected * torch.sigmoid(x @ shared.gate.dequantize(x.dtype).T)
    both = replace(mixture, shared=shared)
    torch.testing.assert_close(both(x), mixture(x) + expected)
    assert len(list(both.linears())) == 1 + 2 * EXPERTS + 3


@pytest.mark.parametrize("columns", [64, 40])  # with the compiled kernels where there are any, and without
def test_a_router_between_integers_multiplies_each_row_as_if_it_were_alone(columns: int) -> None:
    linear, x = RowByRowLinear(torch.randn(12, columns)), torch.randn(9, columns)
    together = linear(x)
    torch.testing.assert_close(together, x @ linear.weight.T, rtol=1e-4, atol=1e-4)
    assert torch.equal(together, torch.cat([linear(row) for row in x.split(1)]))
