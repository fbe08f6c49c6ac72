"""A mixture of experts: the eager reference. The Triton form is in layers/moe_triton.py.

A router gives each row its `top_k` experts and their weights; the output is the weighted sum of what these experts make
of the row. A row's numbers do not depend on the other rows: experts are added in the order of the router's choices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.device.properties import supports_graphs
from paceline.layers.cpu_kernels import blocks_product, joined
from paceline.layers.gemm_types import Linear
from paceline.layers.linear import UnquantizedLinear
from paceline.layers.mlp import silu_mul
from paceline.layers.mxfp4_experts import Mxfp4Matrices

Matrices = Tensor | Mxfp4Matrices  # of all experts: [experts, rows, columns]
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class ClampedSwiGlu:
    """gate · sigmoid(alpha · gate) · (up + 1), with gate below `limit` and up within it on both sides."""

    alpha: float
    limit: float

    def __call__(self, both: Tensor) -> Tensor:
        """Gate and up side by side: [rows, 2 · size] -> [rows, size]"""
        gate, up = both.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """The experts of each row, best first, and how much each counts."""

    experts: Tensor  # int64 [rows, top_k]
    weights: Tensor  # float32 [rows, top_k]


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """Chooses the experts of each row.

    renormalize  the weights of the chosen experts sum to one; else they are their shares among all experts
    scale        times which every weight counts
    """

    linear: Linear
    top_k: int
    renormalize: bool = True
    bias: Tensor | None = None
    scale: float = 1.0

    def __call__(self, x: Tensor) -> Routing:
        return route(self.logits(x), self)

    def logits(self, x: Tensor) -> Tensor:
        """[rows, experts]"""
        return self.linear(x, self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class RowByRowLinear(UnquantizedLinear):
    """A weight in floating point between others in integers, on a CPU.

    A row's product has the same bits among any rows: a last bit could change how a later product rounds its input.
    """

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        blocks = self.blocks
        if blocks is not None:
            return blocks_product(x, joined(blocks), bias)
        return torch.cat([F.linear(row, self.weight, bias) for row in torch.split(x, 1)])


def route(logits: Tensor, router: Router) -> Routing:
    """The best experts by their logits.

    The softmax over the best is the softmax over all, renormalised: both orders in use are one computation.
    """
    logits = logits.float()
    best = logits.topk(router.top_k, dim=-1)
    if router.renormalize:
        weights = best.values.softmax(dim=-1)
    else:
        weights = logits.softmax(dim=-1).gather(-1, best.indices)
    return Routing(best.indices, weights * router.scale)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertMlp:
    """One expert: a gated MLP."""

    gate_up: Linear
    down: Linear
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StackedWeights:
    """The weights of all experts of a layer, one behind the other, as the kernels read them."""

    gate_up: Matrices  # [experts, 2 · size, hidden_size]: the rows of gate, then those of up
    down: Matrices  # [experts, hidden_size, size]
    gate_up_bias: Tensor | None = None  # [experts, 2 · size]
    down_bias: Tensor | None = None  # [experts, hidden_size]


@dataclass(frozen=True, slots=True, eq=False)
class Experts:
    """The experts of a layer. stacked: the same weights for the kernels; None: they are in a format of their own."""

    mlps: tuple[ExpertMlp, ...]
    stacked: StackedWeights | None = None
    activation: ClampedSwiGlu | None = None  # None: silu(gate) · up

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        """The weighted sum of each row's experts. [rows, hidden_size]"""
        pairs, top_k = routing.experts.flatten(), routing.experts.shape[1]
        order = pairs.argsort(stable=True)  # pair i is choice i % top_k of row i // top_k
        counts = pairs.bincount(minlength=len(self.mlps)).tolist()
        outputs = x.new_empty(pairs.shape[0], x.shape[1])
        for mlp, places in zip(self.mlps, torch.split(order, counts)):
            if places.shape[0]:
                outputs[places] = self._mlp(mlp, x[places // top_k])
        return _weighted_sum(outputs.view(x.shape[0], top_k, -1), routing.weights).to(x.dtype)

    def _mlp(self, mlp: ExpertMlp, x: Tensor) -> Tensor:
        both = mlp.gate_up(x, mlp.gate_up_bias)
        activated = silu_mul(both) if self.activation is None else self.activation(both)
        return mlp.down(activated, mlp.down_bias)

    def linears(self) -> Iterator[Linear]:
        for mlp in self.mlps:
            yield from (mlp.gate_up, mlp.down)


def _weighted_sum(outputs: Tensor, weights: Tensor) -> Tensor:
    """outputs [rows, top_k, hidden_size], choice after choice: another order would round otherwise."""
    wide = torch.promote_types(outputs.dtype, torch.float32)
    choices = [outputs[:, choice].to(wide) * weights[:, choice, None] for choice in range(outputs.shape[1])]
    return sum(choices[1:], start=choices[0])


def stacked_experts(weights: StackedWeights, activation: ClampedSwiGlu | None = None) -> Experts:
    """Experts of stacked weights; nothing is copied."""
    gate_up_biases, down_biases = (
        [None] * len(weights.gate_up) if bias is None else list(bias)
        for bias in (weights.gate_up_bias, weights.down_bias)
    )
    linears = zip(_linears(weights.gate_up), _linears(weights.down), gate_up_biases, down_biases)
    return Experts(tuple(ExpertMlp(*parts) for parts in linears), weights, activation)


def _linears(matrices: Matrices) -> Iterable[Linear]:
    return matrices.linears() if isinstance(matrices, Mxfp4Matrices) else map(UnquantizedLinear, matrices)


@dataclass(frozen=True, slots=True, eq=False)
class SharedExpert:
    """A gated MLP that every row passes, times sigmoid(gate) where there is one."""

    gate_up: Linear
    down: Linear
    gate: Linear | None = None  # one output

    def __call__(self, x: Tensor) -> Tensor:
        out = self.down(silu_mul(self.gate_up(x)))
        return out if self.gate is None else torch.sigmoid(self.gate(x)) * out

    def linears(self) -> Iterator[Linear]:
        yield from (self.gate_up, self.down)
        if self.gate is not None:
            yield self.gate


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def has_expert_kernels(device: torch.device | str) -> bool:
    """Whether experts run through the kernels on this device."""
    return supports_graphs(torch.device(device)) and _has_triton()


@dataclass(frozen=True, slots=True, eq=False)
class MixtureOfExperts:
    """What stands in the place of an MLP: a router, its experts, and an expert that all rows share."""

    router: Router
    experts: Experts
    shared: SharedExpert | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Of rows that are normed already. [rows, hidden_size]"""
        routed = self.experts(x, self.router(x))
        return routed if self.shared is None else routed + self.shared(x)

    @property
    def can_fuse(self) -> bool:
        """Whether the kernels take the experts."""
        stacked = self.experts.stacked
        return stacked is not None and stacked.gate_up.dtype in KERNEL_DTYPES

    def needs_kernels(self, x: Tensor) -> bool:
        """On a GPU the loop over experts asks the device how many rows each has, and no graph can hold that."""
        return self.can_fuse and has_expert_kernels(x.device)

    def linears(self) -> Iterator[Linear]:
        """Every linear layer of it."""
        yield self.router.linear
        yield from self.experts.linears()
        if self.shared is not None:
            yield from self.shared.linears()
