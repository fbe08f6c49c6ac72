"""Packed weights: what is stored, the kernel that dequantizes it, and a draft model made of them.

Without a GPU the kernel runs through Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from paceline.core.types import DraftInput, Row
from paceline.errors import OptionError
from paceline.layers.gemm import GemmLauncher
from paceline.layers.gemm_types import Epilogue
from paceline.layers.linear_triton import argmax
from paceline.quantization import registry
from paceline.quantization.int4 import pack_int4
from paceline.quantization.packed import PackedLinear, pack
from paceline.runners.native import NativeRunner
from tests.runners.native.fused import eager_graphs
from tests.runners.native.models import tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def packed(weight: torch.Tensor, bits: int) -> PackedLinear:
    return pack_int4(weight) if bits == 4 else pack(weight, 8, weight.shape[1])


@pytest.mark.parametrize(("bits", "error"), [(8, 0.01), (4, 0.12)])
def test_a_packed_weight_is_the_weight_but_for_rounding(bits: int, error: float) -> None:
    weight = torch.randn(48, 96)
    linear = packed(weight, bits)
    assert (linear.out_features, linear.in_features, linear.quantizes_input) == (48, 96, False)
    assert linear.values.nbytes == 48 * 96 * bits // 8 and linear.nbytes > linear.values.nbytes
    assert (linear.dequantize(torch.float32) - weight).norm() / weight.norm() < error


def test_int4_names_the_sizes_it_takes() -> None:
    with pytest.raises(OptionError, match="multiple of 32"):
        pack_int4(torch.randn(4, 40))


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 5])
def test_products_agree_with_float64(bits: int, rows: int) -> None:
    gemm = GemmLauncher(torch.float32, torch.device(DEVICE), 1e-6)
    x, bias = torch.randn(rows, 608, device=DEVICE), torch.randn(37, device=DEVICE)
    linear, pair = (packed(torch.randn(size, 608, device=DEVICE), bits) for size in (37, 74))
    exact = x.double() @ linear.dequantize(torch.float64).t()
    biased = gemm.product(x, linear, Epilogue(bias=bias)).out.double()
    torch.testing.assert_close(biased, exact + bias, rtol=1e-4, atol=1e-3)
    residual = torch.randn(rows, 37, device=DEVICE)
    added = gemm.product(x, linear, Epilogue(residual=residual, bias=bias)).out.double()
    torch.testing.assert_close(added, exact + residual + bias, rtol=1e-4, atol=1e-3)
    gate, up = (x.double() @ pair.dequantize(torch.float64).t()).chunk(2, dim=-1)
    gated = gemm.product(x, pair, Epilogue(gate=True)).out.double()
    torch.testing.assert_close(gated, torch.nn.functional.silu(gate) * up, rtol=1e-3, atol=1e-2)
    logits = gemm.product(x, linear, Epilogue(norm=torch.ones(608, device=DEVICE), argmax=True))
    assert torch.equal(argmax(gemm, logits).token, logits.out.argmax(dim=-1))


class PackedInt4:
    """int4 as on a GPU, on any device."""

    def quantize(self, weight: torch.Tensor) -> PackedLinear:
        return pack_int4(weight)

    def matches(self, config: object) -> bool:
        return False

    def load(self, tensors: object, names: list[str]) -> PackedLinear:
        raise NotImplementedError


@pytest.mark.slow
def test_a_packed_draft_model_drafts_what_single_steps_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._formats, "packed-int4", PackedInt4())
    model = tiny("llama", hidden_size=96, intermediate_size=96, num_hidden_layers=1).to(DEVICE)
    runner = NativeRunner.of_model(model, "tiny", 1024, weight_format="packed-int4")
    assert not runner.model.quantizes_input
    runner.decode_graphs = eager_graphs(runner)
    prompts = [torch.randint(0, 101, (length,)).tolist() for length in (9, 5)]
    inputs = [DraftInput(runner.new_cache(), prompt) for prompt in prompts]
    drafted = runner.draft(inputs, 2)
    assert drafted is not None
    runner.decode_graphs = None
    for row, prompt in enumerate(prompts):
        seq_cache, steps = runner.new_cache(), []
        output = runner.forward([Row.chain(seq_cache, prompt)], last_only=True)
        for _ in range(2):
            steps.append(int(output.logits[0].argmax()))
            output = runner.forward([Row.chain(seq_cache, steps[-1:])])
        assert drafted.tokens[row].tolist() == steps
