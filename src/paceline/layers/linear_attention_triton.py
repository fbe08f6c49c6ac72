"""Gated delta nets as Triton kernels; the eager reference is in layers/linear_attention.py.

Two launches a layer. The first runs the recurrence: a program reads its part of a sequence's state once, steps through
the kept inputs and the new ones, stores the state where the tokens that are final end, and writes the outputs of the
new tokens. The second norms and gates these outputs, and keeps the new inputs in the ring. Prompts, plain decoding and
verification are the same loop over the same tile, so a token's numbers do not depend on the pass it is read in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paceline.layers.linear_attention import (
    LINEAR_SOFTPLUS,
    NORM_EPS,
    RING,
    DeltaNetSpans,
    DeltaNetWeights,
    Recurrence,
)

VALUE_TILE = 32  # rows of a state in one program: a state of 128 by 128 is shared by four
WARPS = 4
MATH: dict[str, Any] = {"RING_SIZE": RING, "NORM_EPS": NORM_EPS, "LINEAR_SOFTPLUS": LINEAR_SOFTPLUS}

# USE_PDL: as in layers/norm_triton.py.


@triton.jit
def _input(projected, inputs, node_base, ring_base, position, length, column, ROW: tl.constexpr, INPUT: tl.constexpr,
           RING_SIZE: tl.constexpr):  # fmt: skip
    """Columns of the input at a position: from the ring where an earlier pass has read it; zeros before the first."""
    at = column * 0 + position
    ring = inputs + ring_base + (at % RING_SIZE) * INPUT + column
    kept = tl.load(ring, mask=(at >= 0) & (at < length), other=0.0)
    new = tl.load(projected + (node_base + at - length) * ROW + column, mask=at >= length, other=0.0)
    return kept.to(tl.float32) + new.to(tl.float32)


@triton.jit
def _convolved(projected, inputs, convolution, node_base, ring_base, position, length, column, ROW: tl.constexpr,
               INPUT: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr, RING_SIZE: tl.constexpr):  # fmt: skip
    """Columns of queries, keys or values at a position: the last inputs, weighted, through silu."""
    total = tl.zeros(column.shape, dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        weight = tl.load(convolution + tap * CHANNELS + column).to(tl.float32)
        at = position - (TAPS - 1) + tap
        total += weight * _input(projected, inputs, node_base, ring_base, at, length, column, ROW, INPUT, RING_SIZE)
    return total / (1.0 + tl.exp(-total))


@triton.jit
def delta_kernel(
    projected, convolution, decay_rate, decay_bias, states, inputs, out,
    slots, state_lengths, folds, lengths, counts, starts, states_base, inputs_base, scale,
    KEY_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE: tl.constexpr,
    TAPS: tl.constexpr, RING_SIZE: tl.constexpr, NORM_EPS: tl.constexpr, LINEAR_SOFTPLUS: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """The recurrence of TILE rows of one head's state of one sequence."""
    seq = tl.program_id(0)
    head = tl.program_id(1)
    tile = tl.program_id(2)
    heads: tl.constexpr = KEY_HEADS * GROUP
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + heads * VALUE_DIM
    input_size: tl.constexpr = channels + 2 * heads
    row_size: tl.constexpr = input_size + heads * VALUE_DIM
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    count = tl.load(counts + seq)
    if count > 0:
        slot = tl.load(slots + seq)
        length = tl.load(lengths + seq)
        fold = tl.load(folds + seq)
        start = tl.load(starts + seq)
        ring_base = inputs_base + slot * RING_SIZE * input_size
        key_at = tl.arange(0, KEY_DIM)
        value_at = tile * TILE + tl.arange(0, TILE)
        query_columns = (head // GROUP) * KEY_DIM + key_at
        key_columns = KEY_HEADS * KEY_DIM + query_columns
        value_columns = 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + value_at
        rate = tl.exp(tl.load(decay_rate + head).to(tl.float32))
        bias = tl.load(decay_bias + head).to(tl.float32)
        state_at = states + states_base + (slot * heads + head) * VALUE_DIM * KEY_DIM
        state_at += value_at[:, None] * KEY_DIM + key_at[None, :]
        state = tl.load(state_at)
        for position in range(tl.load(state_lengths + seq), length + count):
            query = _convolved(projected, inputs, convolution, start, ring_base, position, length, query_columns,
                               row_size, input_size, channels, TAPS, RING_SIZE)  # fmt: skip
            key = _convolved(projected, inputs, convolution, start, ring_base, position, length, key_columns,
                             row_size, input_size, channels, TAPS, RING_SIZE)  # fmt: skip
            value = _convolved(projected, inputs, convolution, start, ring_base, position, length, value_columns,
                               row_size, input_size, channels, TAPS, RING_SIZE)  # fmt: skip
            query = query * (tl.rsqrt(tl.sum(query * query, axis=0) + NORM_EPS) * scale)
            key = key * tl.rsqrt(tl.sum(key * key, axis=0) + NORM_EPS)
            strength = _input(projected, inputs, start, ring_base, position, length, channels + head,
                              row_size, input_size, RING_SIZE)  # fmt: skip
            decay = bias + _input(projected, inputs, start, ring_base, position, length, channels + heads + head,
                                  row_size, input_size, RING_SIZE)  # fmt: skip
            decay = tl.where(decay > LINEAR_SOFTPLUS, decay, tl.log(1.0 + tl.exp(tl.minimum(decay, LINEAR_SOFTPLUS))))
            state = state * tl.exp(-rate * decay)
            error = (value - tl.sum(state * key[None, :], axis=1)) / (1.0 + tl.exp(-strength))
            state = state + error[:, None] * key[None, :]
            if position >= length:
                row = start + position - length
                mixed = tl.sum(state * query[None, :], axis=1)
                tl.store(out + (row * heads + head) * VALUE_DIM + value_at, mixed)
            if position + 1 == fold:
                tl.store(state_at, state)


@triton.jit
def gated_norm_kernel(
    mixed, projected, norm, inputs, out, node_seqs, slots, lengths, counts, starts, inputs_base, eps,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, INPUT: tl.constexpr, COPIED: tl.constexpr, RING_SIZE: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """One head of one new token: norm and gate of its output, and its share of the token's inputs into the ring."""
    node = tl.program_id(0)
    head = tl.program_id(1)
    row_size: tl.constexpr = INPUT + HEADS * VALUE_DIM
    at = tl.arange(0, VALUE_DIM)
    gain = tl.load(norm + at).to(tl.float32)
    if USE_PDL:
        gdc_wait()
        gdc_launch_dependents()
    seq = tl.load(node_seqs + node)
    place = node - tl.load(starts + seq)  # in its row
    count = tl.load(counts + seq)
    if place < count:
        wide = tl.load(mixed + (node * HEADS + head) * VALUE_DIM + at)
        wide = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / VALUE_DIM + eps) * gain
        gate = tl.load(projected + node * row_size + INPUT + head * VALUE_DIM + at).to(tl.float32)
        gated = wide * (gate / (1.0 + tl.exp(-gate)))
        tl.store(out + (node * HEADS + head) * VALUE_DIM + at, gated.to(out.dtype.element_ty))
        if place + RING_SIZE >= count:
            share = (INPUT + HEADS - 1) // HEADS
            column = head * share + tl.arange(0, COPIED)
            ok = (column < (head + 1) * share) & (column < INPUT)
            ring_row = tl.load(slots + seq) * RING_SIZE + (tl.load(lengths + seq) + place) % RING_SIZE
            copied = tl.load(projected + node * row_size + column, mask=ok)
            tl.store(inputs + inputs_base + ring_row * INPUT + column, copied, mask=ok)
    else:
        tl.store(out + (node * HEADS + head) * VALUE_DIM + at, tl.zeros([VALUE_DIM], dtype=out.dtype.element_ty))


def launch_delta_net(
    projected: Tensor,
    weights: DeltaNetWeights,
    layer: int,
    spans: DeltaNetSpans,
    eps: float,
    *,
    use_pdl: bool = False,
    launch: dict[str, Any] | None = None,
) -> Tensor:
    """As `gated_delta_net`. launch: options of the launch."""
    memory, options = spans.memory, launch or {}
    sizes, nodes, heads = memory.sizes, projected.shape[0], memory.sizes.num_value_heads
    mixed = torch.empty(nodes, sizes.value_size, dtype=torch.float32, device=projected.device)
    out = torch.empty(nodes, sizes.value_size, dtype=projected.dtype, device=projected.device)
    tile = min(VALUE_TILE, sizes.value_dim)
    states_base, inputs_base = layer * memory.states.stride(0), layer * memory.inputs.stride(0)
    delta_kernel[(spans.slots.shape[0], heads, sizes.value_dim // tile)](
        projected, weights.convolution, weights.decay_rate, weights.decay_bias, memory.states, memory.inputs, mixed,
        spans.slots, spans.state_lengths, spans.folds, spans.lengths, spans.counts, spans.starts,
        states_base, inputs_base, sizes.key_dim**-0.5,
        KEY_HEADS=sizes.num_key_heads, GROUP=heads // sizes.num_key_heads, KEY_DIM=sizes.key_dim,
        VALUE_DIM=sizes.value_dim, TILE=tile, TAPS=sizes.taps, USE_PDL=use_pdl, num_warps=WARPS, **MATH, **options,
    )  # fmt: skip
    share = triton.cdiv(sizes.input_size, heads)
    gated_norm_kernel[(nodes, heads)](
        mixed, projected, weights.norm, memory.inputs, out,
        spans.node_seqs, spans.slots, spans.lengths, spans.counts, spans.starts, inputs_base, eps,
        HEADS=heads, VALUE_DIM=sizes.value_dim, INPUT=sizes.input_size, COPIED=triton.next_power_of_2(share),
        RING_SIZE=RING, USE_PDL=use_pdl, num_warps=WARPS, **options,
    )  # fmt: skip
    return out


@dataclass(frozen=True, slots=True, eq=False)
class KernelRecurrence(Recurrence):
    """One pass of the kernels outside of graphs."""

    spans: DeltaNetSpans

    def __call__(self, projected: Tensor, weights: DeltaNetWeights, layer: int, eps: float) -> Tensor:
        return launch_delta_net(projected.contiguous(), weights, layer, self.spans, eps)
