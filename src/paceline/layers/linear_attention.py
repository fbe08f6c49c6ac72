"""Gated delta nets, which keep a state of fixed size where attention keeps keys and values: the eager reference.

A token's queries, keys and values come out of a short convolution over the inputs of the last tokens. Then, head by
head, with a decay and a write strength of its own:

    state = decay · state
    state = state + strength · (value - state · key) ⊗ key
    output = state · query

A state cannot be taken back. So a pass does not advance it past tokens that may still be rejected: their inputs are
kept in a ring, and the next pass first folds the accepted ones into the state. Prompts, plain decoding and verification
all run this one recurrence, token by token, so the same tokens give the same bits however they were read: every
operation here is elementwise or a sum along the last, contiguous dimension, and of the functions whose vector and
scalar forms may differ only exp and log1p are used, which torch computes one way everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.device.properties import on_host
from paceline.layers.norm import rms_norm

RING = 64  # inputs kept of a sequence: those that may be rejected, the convolution's, and those a pass adds
MAX_UNSETTLED = 30  # tokens that may be rejected; a pass adds as many, and the ring holds both and the convolution's
LINEAR_SOFTPLUS = 20.0  # above it softplus is its argument
NORM_EPS = 1e-6  # of the length of queries and keys
MIN_KERNEL_DIM = 16


@dataclass(frozen=True, slots=True)
class DeltaNetSizes:
    """Heads of the gated delta nets of a model, and taps of their convolution."""

    num_layers: int  # of this kind
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    @property
    def key_size(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def input_size(self) -> int:
        """What the state depends on of a token: the convolution's input, and of each head strength and decay."""
        return self.channels + 2 * self.num_value_heads

    @property
    def fits_kernels(self) -> bool:
        """Whether the Triton kernels take heads of these sizes."""
        return all(dim >= MIN_KERNEL_DIM and dim & (dim - 1) == 0 for dim in (self.key_dim, self.value_dim))

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return self.num_value_heads, self.value_dim, self.key_dim


@dataclass(frozen=True, slots=True, eq=False)
class DeltaNetWeights:
    """What a gated delta net has beside its two projections."""

    convolution: Tensor  # [taps, channels]
    decay_rate: Tensor  # [value heads]: the logarithm of A
    decay_bias: Tensor  # [value heads]
    norm: Tensor  # [value_dim]


@dataclass(frozen=True, slots=True, eq=False)
class DeltaNetStates:
    """The states of all sequences, each in a slot, and the ring of its last inputs: by position modulo RING."""

    sizes: DeltaNetSizes
    states: Tensor  # float32 or wider [layers, slots, value heads, value_dim, key_dim]
    inputs: Tensor  # [layers, slots, RING, input size]


@dataclass(frozen=True, slots=True, eq=False)
class Fold:
    """Sequences whose state is stored after so many steps: the tokens up to there are final."""

    steps: int
    seqs: Tensor  # int64 [sequences]
    slots: Tensor  # int64 [sequences]


class Recurrence(Protocol):
    """One pass, as recurrent layers read it."""

    def __call__(self, projected: Tensor, weights: DeltaNetWeights, layer: int, eps: float) -> Tensor:
        """As `gated_delta_net`, for the rows of this pass."""


@dataclass(frozen=True, slots=True, eq=False)
class DeltaNetSpans:
    """One pass for the kernels: all int64, of each sequence, and for each node its sequence."""

    memory: DeltaNetStates
    slots: Tensor
    state_lengths: Tensor  # tokens that the state is after
    folds: Tensor  # tokens that it is after when the pass ends
    lengths: Tensor  # tokens read before the pass
    counts: Tensor  # nodes of the pass
    starts: Tensor  # the first node among all
    node_seqs: Tensor  # [nodes]


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentBatch(Recurrence):
    """One pass for the eager reference: sequences side by side, step by step, the shorter ones padded.

    A sequence steps through the tokens after its state that earlier passes have read, then through its new ones.
    """

    memory: DeltaNetStates
    slots: Tensor  # int64 [sequences]
    kept: Tensor  # int64 [tokens]: places in the ring of a layer that the pass reads
    window: Tensor  # int64 [taps - 1 + steps, sequences]: 0 is no token, then come the kept ones, then the new ones
    nodes: Tensor  # int64 [nodes]: the place of each new token in [steps · sequences]
    stored_nodes: Tensor  # int64: new tokens whose inputs are kept
    stored_places: Tensor  # int64: where in the ring
    folds: list[Fold]

    def __call__(self, projected: Tensor, weights: DeltaNetWeights, layer: int, eps: float) -> Tensor:
        return gated_delta_net(projected, weights, layer, self, eps)


@dataclass(frozen=True, slots=True, eq=False)
class DeltaSteps:
    """What the recurrence reads at each step: [steps, sequences, value heads, …]."""

    queries: Tensor  # [… , 1, key_dim]
    keys: Tensor
    values: Tensor  # [… , value_dim]
    decays: Tensor  # [… , 1, 1]
    strengths: Tensor  # [… , 1]


def gated_delta_net(
    projected: Tensor, weights: DeltaNetWeights, layer: int, batch: RecurrentBatch, eps: float
) -> Tensor:
    """Outputs of the new tokens [nodes, value size].

    projected  [nodes, input size + value size]: queries, keys, values, strengths, decays, and the output's gate
    layer      among the layers of this kind
    """
    memory, sizes = batch.memory, batch.memory.sizes
    inputs, gate = torch.split(projected, [sizes.input_size, sizes.value_size], dim=-1)
    ring = memory.inputs[layer].view(-1, sizes.input_size)
    sources = torch.cat([inputs.new_zeros(1, sizes.input_size), ring[batch.kept], inputs])
    steps = delta_steps(sources[batch.window], weights, sizes, memory.states.dtype)
    ring[batch.stored_places] = inputs[batch.stored_nodes]
    outputs = recurrence(steps, memory.states[layer], batch).flatten(0, 1)[batch.nodes]
    return gated_norm(outputs, gate.view(outputs.shape), weights.norm, eps).view(gate.shape)


def delta_steps(rows: Tensor, weights: DeltaNetWeights, sizes: DeltaNetSizes, dtype: torch.dtype) -> DeltaSteps:
    """Inputs [taps - 1 + steps, sequences, input size] -> what the recurrence reads."""
    heads = sizes.num_value_heads
    mixed, strengths, decays = torch.split(rows.to(dtype), [sizes.channels, heads, heads], dim=-1)
    channels = convolved(mixed, weights.convolution.to(dtype))
    parts = torch.split(channels, [sizes.key_size, sizes.key_size, sizes.value_size], dim=-1)
    queries, keys = (_unit(part.reshape(*part.shape[:2], -1, sizes.key_dim)) for part in parts[:2])
    group = heads // sizes.num_key_heads
    queries, keys = (part.repeat_interleave(group, dim=2).unsqueeze(-2) for part in (queries, keys))
    first = sizes.taps - 1
    rates = weights.decay_rate.to(dtype).exp() * _softplus(decays[first:] + weights.decay_bias.to(dtype))
    return DeltaSteps(
        queries * sizes.key_dim**-0.5,
        keys,
        parts[2].reshape(*parts[2].shape[:2], heads, sizes.value_dim),
        rates.neg().exp()[..., None, None],
        sigmoid(strengths[first:])[..., None],
    )


def convolved(mixed: Tensor, taps: Tensor) -> Tensor:
    """Each channel's inputs at the last steps, weighted, through silu: [taps - 1 + steps, …] -> [steps, …]"""
    steps = mixed.shape[0] - taps.shape[0] + 1
    total = mixed[:steps] * taps[0]
    for tap in range(1, taps.shape[0]):
        total = total + mixed[tap : tap + steps] * taps[tap]
    return total * sigmoid(total)


def recurrence(steps: DeltaSteps, states: Tensor, batch: RecurrentBatch) -> Tensor:
    """Run every sequence from its state; store the states that the batch asks for. [steps, sequences, heads, value_dim]

    Padding steps after a sequence's own come last, so nothing reads what they do to its state.
    """
    state = states[batch.slots]
    outputs = torch.empty_like(steps.values)
    folds = {fold.steps: fold for fold in batch.folds}
    for step in range(steps.values.shape[0]):
        keys = steps.keys[step]
        state = state * steps.decays[step]
        error = steps.values[step] - (state * keys).sum(dim=-1)
        state = state + (error * steps.strengths[step]).unsqueeze(-1) * keys
        outputs[step] = (state * steps.queries[step]).sum(dim=-1)
        if step + 1 in folds:
            fold = folds[step + 1]
            states[fold.slots] = state[fold.seqs]
    return outputs


def gated_norm(outputs: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Heads normed, times silu of the gate: float32 or wider [nodes, heads, value_dim] -> the type of the gate."""
    wide = gate.to(outputs.dtype)
    return (rms_norm(outputs, weight.to(outputs.dtype), eps) * (wide * sigmoid(wide))).to(gate.dtype)


def _unit(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt((heads * heads).sum(dim=-1, keepdim=True) + NORM_EPS)


def sigmoid(x: Tensor) -> Tensor:
    """In float32 or wider; the same bits wherever in a tensor a value is, as on GPUs always."""
    if not on_host(x.device):
        return torch.sigmoid(x)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (1.0 / (1.0 + wide.neg().exp())).to(x.dtype)


def _softplus(x: Tensor) -> Tensor:
    return torch.where(x > LINEAR_SOFTPLUS, x, x.clamp_max(LINEAR_SOFTPLUS).exp().log1p())
