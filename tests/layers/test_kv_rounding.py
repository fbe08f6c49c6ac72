"""Keys and values in eight bits: torch's rounding, and the same bits in the attention kernel."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from paceline.layers.attention_kernels import _cached, _rounded
from paceline.layers.kv_rounding import STORED_DTYPE, from_cache, to_cache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COUNT = 4096


@triton.jit
def round_kernel(numbers, stored, restored, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    code = _rounded(tl.load(numbers + place))
    tl.store(stored + place, code)
    tl.store(restored + place, _cached(code, tl.float32, True))


def numbers_of_all_sizes() -> torch.Tensor:
    """From far below the smallest step to far above the largest number, ties among them."""
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(COUNT - 512, generator=generator) * 10.0 ** torch.empty(COUNT - 512).uniform_(
        -5, 3, generator=generator
    )
    exact = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).float()
    exact[exact.isnan()] = 0.0
    ties = (exact + exact.roll(1)) / 2
    return torch.cat([wide, exact, ties])


def test_the_kernel_rounds_and_reads_as_torch_does() -> None:
    numbers, cache = numbers_of_all_sizes(), torch.empty(0, dtype=STORED_DTYPE)
    stored, restored = torch.zeros(COUNT, dtype=STORED_DTYPE, device=DEVICE), torch.zeros(COUNT, device=DEVICE)
    round_kernel[(1,)](numbers.to(DEVICE), stored, restored, SIZE=COUNT)
    expected = to_cache(numbers, cache)
    assert torch.equal(stored.cpu(), expected)
    assert torch.equal(restored.cpu(), from_cache(expected, torch.float32))


def test_numbers_keep_three_bits_and_what_is_too_large_is_the_largest() -> None:
    cache = torch.empty(0, dtype=STORED_DTYPE)
    numbers = torch.tensor([1e6, -1e6, 0.1, -3.3, 0.0])
    restored = from_cache(to_cache(numbers, cache), torch.float32)
    assert restored[:2].tolist() == [448.0, -448.0]
    assert ((restored[2:] - numbers[2:]).abs() <= numbers[2:].abs() / 16).all()


def test_a_cache_in_floating_point_is_left_alone() -> None:
    numbers = torch.randn(8)
    assert to_cache(numbers, numbers) is numbers and from_cache(numbers, torch.float32) is numbers
