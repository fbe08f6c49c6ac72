"""Products of blocked weights: close to the exact ones, and the same bits for a token whatever is beside it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from paceline.layers import cpu_kernels
from paceline.layers.cpu_kernels import blocks_product, float_blocks, joined, pack_blocks, unpack_blocks

pytestmark = pytest.mark.skipif(cpu_kernels.library() is None, reason="no compiled kernels on this machine")


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("bits", "error"), [(8, 0.01), (4, 0.12)])
@pytest.mark.parametrize("rows", [8, 37])
def test_blocks_hold_the_weight_but_for_rounding(bits: int, error: float, rows: int) -> None:
    weight = torch.randn(rows, 96) * torch.rand(rows, 1)
    unpacked = unpack_blocks(pack_blocks(weight, bits))
    assert (unpacked - weight).norm() / weight.norm() < error
    again = unpack_blocks(pack_blocks(unpacked, bits))
    torch.testing.assert_close(again, unpacked, rtol=0.01, atol=1e-3)  # scales have eight bits


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [64, 37])
@pytest.mark.parametrize("nodes", [1, 2, 3, 7, 70])
def test_a_product_is_that_of_the_rounded_weight_and_input(bits: int, rows: int, nodes: int) -> None:
    blocks, x, bias = pack_blocks(torch.randn(rows, 96), bits), torch.randn(nodes, 96), torch.randn(rows)
    groups = x.double().view(nodes, -1, 32)
    scales = groups.abs().amax(dim=-1, keepdim=True) / 127
    rounded = ((groups / scales).round() * scales).view(nodes, 96)
    exact = rounded @ unpack_blocks(blocks).double().T + bias
    torch.testing.assert_close(blocks_product(x, joined([blocks]), bias).double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_token_is_the_same_bits_at_every_width_and_with_every_number_of_threads(bits: int) -> None:
    blocks, x = pack_blocks(torch.randn(136, 576), bits), torch.randn(69, 576)
    weight = joined([blocks])
    torch.set_num_threads(1)
    alone = torch.cat([blocks_product(row[None], weight, None) for row in x])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for width in (2, 3, 4, 5, 8, 12, 17, 69):
            assert torch.equal(blocks_product(x[:width], weight, None), alone[:width])


@pytest.mark.parametrize("rows", [64, 37])
def test_a_product_in_floating_point_is_exact_but_for_last_bits(rows: int) -> None:
    weight, x, bias = torch.randn(rows, 96), torch.randn(70, 96), torch.randn(rows)
    blocks = float_blocks(weight)
    assert blocks is not None and float_blocks(weight.bfloat16()) is None and float_blocks(weight[:, 1:]) is None
    whole = blocks_product(x, joined([blocks]), bias)
    torch.testing.assert_close(whole.double(), x.double() @ weight.double().T + bias, rtol=1e-5, atol=1e-5)
    for width in (1, 2, 3, 9):
        assert torch.equal(blocks_product(x[:width], joined([blocks]), bias), whole[:width])


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_zeros_stay_zeros_and_what_is_no_number_stays_none(value: float) -> None:
    blocks = pack_blocks(torch.ones(8, 64), 8)
    out = blocks_product(torch.full((1, 64), value), joined([blocks]), None)
    assert (out == 0).all() if value == 0 else not out.isfinite().any()
