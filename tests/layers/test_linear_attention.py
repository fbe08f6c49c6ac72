"""Gated delta nets: the recurrence as it is defined, and the same bits however a sequence is cut into passes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from paceline.core.types import Row
from paceline.layers.linear_attention import (
    MAX_UNSETTLED,
    RING,
    DeltaNetSizes,
    DeltaNetWeights,
)
from paceline.runners.native.kv_cache import NativeSequenceCache
from paceline.runners.native.recurrent_states import RecurrentStates

SIZES = DeltaNetSizes(num_layers=2, num_key_heads=2, num_value_heads=6, key_dim=8, value_dim=12, taps=4)
EPS, LAYER = 1e-6, 1


def weights(dtype: torch.dtype = torch.float32) -> DeltaNetWeights:
    generator = torch.Generator().manual_seed(2)
    heads = SIZES.num_value_heads
    shapes = ((SIZES.taps, SIZES.channels), (heads,), (heads,), (SIZES.value_dim,))
    return DeltaNetWeights(*(torch.randn(shape, generator=generator).to(dtype) for shape in shapes))


def projections(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, SIZES.input_size + SIZES.value_size, generator=generator).to(dtype)


def new_states(dtype: torch.dtype = torch.float32) -> RecurrentStates:
    return RecurrentStates(SIZES, 8, dtype, torch.device("cpu"))


def read(states: RecurrentStates, rows: dict[NativeSequenceCache, Tensor]) -> list[Tensor]:
    """One pass of the layer; every cache then holds its row."""
    chains = [Row.chain(cache, [0] * part.shape[0]) for cache, part in rows.items()]
    with states.reading(chains, [cache.recurrent for cache in rows]) as spans:
        batch = states.recurrence(spans)
        assert batch is not None
        outputs = batch(torch.cat([*rows.values()]), weights(states.memory.inputs.dtype), LAYER, EPS)
    for cache, part in rows.items():
        cache.length += part.shape[0]
    return list(outputs.split([part.shape[0] for part in rows.values()]))


def at_once(row: Tensor) -> Tensor:
    [output] = read(new_states(row.dtype), {NativeSequenceCache(): row})
    return output


def by_definition(row: Tensor) -> Tensor:
    """One token after another, one head after another."""
    parts = weights(row.dtype)
    mixed, strengths, decays, gate = row.split([SIZES.channels, 6, 6, SIZES.value_size], dim=-1)
    state = torch.zeros(6, 12, 8, dtype=row.dtype)
    outputs = []
    for step in range(row.shape[0]):
        taps = [mixed[step - 3 + tap] if step - 3 + tap >= 0 else torch.zeros_like(mixed[0]) for tap in range(4)]
        total = torch.nn.functional.silu(sum(tap * weight for tap, weight in zip(taps, parts.convolution)))
        query, key, value = total.split([16, 16, 72])
        for head in range(6):
            q, k = (
                part.view(2, 8)[head // 3] / (part.view(2, 8)[head // 3].square().sum() + 1e-6).sqrt()
                for part in (query, key)
            )
            rate = torch.nn.functional.softplus(decays[step, head] + parts.decay_bias[head])
            rate = rate * parts.decay_rate[head].exp()
            decayed = state[head] * (-rate).exp()
            error = value.view(6, 12)[head] - decayed @ k
            state[head] = decayed + torch.sigmoid(strengths[step, head]) * torch.outer(error, k)
            outputs.append(state[head] @ q / 8**0.5)
    heads = torch.stack(outputs).view(row.shape[0], 6, 12)
    normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + EPS) * parts.norm
    return (normed * torch.nn.functional.silu(gate.view(-1, 6, 12))).flatten(1)


def test_the_layer_computes_what_it_is_defined_as() -> None:
    row = projections(9, dtype=torch.float64)
    torch.testing.assert_close(at_once(row), by_definition(row), rtol=1e-12, atol=1e-12)


def test_the_states_of_16_bit_models_are_kept_in_32() -> None:
    states = new_states(torch.bfloat16)
    assert states.memory.states.dtype == torch.float32 and states.memory.inputs.dtype == torch.bfloat16
    exact = by_definition(projections(40, dtype=torch.bfloat16).double())
    torch.testing.assert_close(at_once(projections(40, dtype=torch.bfloat16)).double(), exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("cuts", [range(150), (0, 1, 64, 128, 150), (0, 31, 62, 150), (0, 149, 150)])
def test_a_sequence_has_the_same_bits_however_it_is_cut(cuts: tuple[int, ...]) -> None:
    row, states, cache = projections(150), new_states(), NativeSequenceCache()
    expected = at_once(row)
    for start, end in pairwise(cuts):
        [output] = read(states, {cache: row[start:end]})
        states.settle(cache.recurrent, cache.length)
        assert torch.equal(output, expected[start:end])


def test_a_sequence_has_the_same_bits_in_every_batch() -> None:
    rows, states = [projections(80, seed) for seed in range(3)], new_states()
    caches = [NativeSequenceCache() for _ in rows]
    expected = [at_once(row) for row in rows]
    read(states, {caches[0]: rows[0][:50]})
    counts = [(50, 3), (0, 70), (0, 1)]
    outputs = read(states, {cache: row[a : a + n] for cache, row, (a, n) in zip(caches, rows, counts)})
    for output, whole, (start, count) in zip(outputs, expected, counts):
        assert torch.equal(output, whole[start : start + count])


@pytest.mark.parametrize("accepted", range(6))
def test_rejected_tokens_leave_no_trace(accepted: int) -> None:
    """Every step reads five draft tokens of which some are right; the others are noise."""
    row, noise = projections(120), projections(120, seed=9)
    states, cache, expected = new_states(), NativeSequenceCache(), at_once(row)
    read(states, {cache: row[:40]})
    states.settle(cache.recurrent, 40)
    while cache.length + 6 <= 120:
        start = cache.length
        right = slice(start, start + 1 + accepted)
        draft = torch.cat([row[right], noise[right.stop : start + 6]])
        [output] = read(states, {cache: draft})
        assert torch.equal(output[: accepted + 1], expected[right])
        cache.length = right.stop
        states.settle(cache.recurrent, cache.length)


def test_the_ring_holds_what_a_pass_may_read_and_write() -> None:
    needed = 2 * MAX_UNSETTLED + SIZES.taps - 1
    assert needed <= RING
