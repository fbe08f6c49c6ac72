"""int8 and int4 linear layers on a CPU: close to the exact product."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.errors import CapabilityError
from paceline.quantization import int4, int8
from paceline.quantization.int4 import has_int4_kernel

needs_int4 = pytest.mark.skipif(not has_int4_kernel(), reason="no int4 kernel on this machine")
FORMATS = [pytest.param(int8, 0.02, id="int8"), pytest.param(int4, 0.15, id="int4", marks=needs_int4)]


@pytest.mark.parametrize(("weight_format", "limit"), FORMATS)
def test_a_product_is_close(weight_format: Any, limit: float) -> None:
    weight, bias = torch.randn(96, 64) * torch.rand(96, 1), torch.randn(96)
    x = torch.randn(5, 64) * torch.tensor([[1.0], [100.0], [1.0], [0.01], [1.0]])
    linear = weight_format.quantize(weight)
    exact = x @ weight.T
    error = (linear(x) - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert error.max() < limit  # also for the token a hundred times larger than its neighbours
    torch.testing.assert_close(linear(x, bias), linear(x) + bias)


@pytest.mark.parametrize(("weight_format", "limit"), FORMATS)
def test_a_layer_answers_for_its_format(weight_format: Any, limit: float) -> None:
    weight = torch.randn(96, 64)
    linear = weight_format.quantize(weight)
    assert (linear.out_features, linear.in_features, linear.quantizes_input) == (96, 64, True)
    assert linear.nbytes < weight.nbytes / 2
    assert (linear.dequantize(torch.float32) - weight).norm() / weight.norm() < limit


@pytest.mark.parametrize("weight_format", [int8, int4])
def test_no_checkpoint_is_stored_in_a_format_of_conversion(weight_format: Any) -> None:
    assert not weight_format.matches(object())
    with pytest.raises(CapabilityError, match="converted at load"):
        weight_format.load({}, ["layer"])


def test_a_layer_used_inside_inference_mode_works_outside_of_it() -> None:
    """Its buffers are kept for the next product of the same size, wherever that is computed."""
    linear = int8.quantize(torch.randn(96, 48))
    x = torch.randn(5, 48)
    with torch.inference_mode():
        inside = linear(x).clone()
    assert torch.equal(linear(x), inside)


@pytest.mark.parametrize("columns", [48, 80, 192])
@pytest.mark.parametrize("saturates", [False, True])
def test_products_of_the_largest_numbers_are_close_on_this_machine(
    saturates: bool, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where pairs of products are added in 16 bits, the largest weights and inputs must still fit them."""
    if saturates:
        monkeypatch.setattr(int8, "_saturates", lambda: True)  # a machine that does not is right with fewer levels too
    torch.manual_seed(0)
    limit = 0.03 if saturates or int8._saturates() else 0.015
    for make in (torch.ones, torch.randn):
        weight, x = make(9, columns), make(5, columns)
        product, exact = int8._dynamic(weight)(x), x @ weight.T
        assert (product - exact).norm() / exact.norm() < limit
