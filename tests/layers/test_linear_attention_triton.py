"""The kernels of gated delta nets against the eager reference, and the same bits however a sequence is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from paceline.core.types import Row
from paceline.layers.linear_attention import DeltaNetSizes, DeltaNetWeights
from paceline.runners.native.kv_cache import NativeSequenceCache
from paceline.runners.native.recurrent_states import RecurrentStates

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = DeltaNetSizes(num_layers=2, num_key_heads=1, num_value_heads=2, key_dim=16, value_dim=16, taps=3)
EPS, LAYER = 1e-6, 1


@pytest.fixture(autouse=True)
def _tiles_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs share a state, as with real sizes."""
    monkeypatch.setattr("paceline.layers.linear_attention_triton.VALUE_TILE", 8)


def states(kernels: bool) -> RecurrentStates:
    new = RecurrentStates(SIZES, 4, torch.float32, DEVICE)
    new._runs_kernels = kernels
    return new


def weights() -> DeltaNetWeights:
    generator = torch.Generator().manual_seed(2)
    heads = SIZES.num_value_heads
    shapes = ((SIZES.taps, SIZES.channels), (heads,), (heads,), (SIZES.value_dim,))
    return DeltaNetWeights(*(torch.randn(shape, generator=generator).to(DEVICE) for shape in shapes))


def projections(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, SIZES.input_size + SIZES.value_size, generator=generator).to(DEVICE)


def read(memory: RecurrentStates, rows: dict[NativeSequenceCache, Tensor]) -> list[Tensor]:
    chains = [Row.chain(cache, [0] * part.shape[0]) for cache, part in rows.items()]
    with memory.reading(chains, [cache.recurrent for cache in rows]) as spans:
        outputs = memory.recurrence(spans)(torch.cat([*rows.values()]), weights(), LAYER, EPS)
    for cache, part in rows.items():
        cache.length += part.shape[0]
    return list(outputs.split([part.shape[0] for part in rows.values()]))


@pytest.mark.slow
def test_kernels_agree_with_the_reference_through_accepted_and_rejected_tokens() -> None:
    rows = [projections(40, seed) for seed in range(2)]
    # of each sequence: tokens read, and those accepted
    steps = [((6, 6), (3, 2)), ((3, 2), (2, 1)), ((1, 1), (2, 2)), ((2, 0), (2, 2)), ((1, 1), (1, 1))]
    outputs: list[list[Tensor]] = []
    for kernels in (False, True):
        memory, caches, found = states(kernels), [NativeSequenceCache() for _ in rows], list[Tensor]()
        for step in steps:
            parts = {
                cache: row[cache.length : cache.length + count]
                for cache, row, (count, _) in zip(caches, rows, step)
            }
            found += read(memory, parts)
            for cache, (count, accepted) in zip(caches, step):
                cache.length += accepted - count
                memory.settle(cache.recurrent, cache.length)
        outputs.append(found)
    for ours, reference in zip(*outputs[::-1]):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [(0, 1, 2, 5), (0, 32, 35)])
def test_kernels_give_a_sequence_the_same_bits_however_it_is_cut(cuts: tuple[int, ...]) -> None:
    row, memory, cache = projections(cuts[-1], 0), states(True), NativeSequenceCache()
    [expected] = read(states(True), {NativeSequenceCache(): row})
    for start, end in pairwise(cuts):
        [output] = read(memory, {cache: row[start:end]})
        memory.settle(cache.recurrent, cache.length)
        assert torch.equal(output, expected[start:end])
