"""Matrices of few bits on a GPU: what is stored, the kernel that unpacks it, and a draft made of them.

Without a GPU the kernel runs through Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from paceline.core import Row
from paceline.core.types import DraftInput
from paceline.errors import OptionError
from paceline.runners.native import NativeRunner
from paceline.runners.native.decode_graphs import DecodeGraphs
from paceline.runners.native.kv_cache import BLOCK_SIZE
from paceline.runners.native.loading import pack_weights
from paceline.runners.native.quantization import PackedMatrix, packed_weights
from paceline.runners.native.triton_ops import Epilogue, TritonOps
from tests.runners.native.models import tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("word", "error"), [("int8", 0.01), ("int4", 0.12)])
def test_a_packed_matrix_is_the_matrix_but_for_rounding(word: str, error: float) -> None:
    weight = torch.randn(48, 96)
    packed = packed_weights(weight, word)
    assert packed.shape == (48, 96)
    assert packed.values.nbytes == 48 * 96 * packed.bits // 8
    assert (packed.whole(torch.float32) - weight).norm() / weight.norm() < error


def test_int4_says_which_matrices_it_takes() -> None:
    with pytest.raises(OptionError, match="multiple of 32"):
        packed_weights(torch.randn(4, 40), "int4")


def ops_of(runner: NativeRunner, *, vectors: bool = False) -> TritonOps:
    return TritonOps(runner.shape, runner.keys, runner.values, runner.rope_cache, BLOCK_SIZE, vectors=vectors)


@pytest.mark.parametrize("word", ["int8", "int4"])
@pytest.mark.parametrize("rows", [1, 5])
def test_products_agree_with_float64(word: str, rows: int) -> None:
    ops = ops_of(NativeRunner.of_model(tiny("llama").to(DEVICE), "tiny", kv_cache_tokens=128))
    x, bias = torch.randn(rows, 608, device=DEVICE), torch.randn(37, device=DEVICE)
    matrix, pair = (packed_weights(torch.randn(size, 608, device=DEVICE), word) for size in (37, 74))
    exact = x.double() @ matrix.whole(torch.float64).t()
    torch.testing.assert_close(ops._product(x, matrix, Epilogue(bias=bias)).double(), exact + bias, rtol=1e-4, atol=1e-3)
    residual = torch.randn(rows, 37, device=DEVICE)
    added = ops._product(x, matrix, Epilogue(residual=residual)).double()
    torch.testing.assert_close(added, exact + residual, rtol=1e-4, atol=1e-3)
    gate, up = (x.double() @ pair.whole(torch.float64).t()).chunk(2, dim=-1)
    gated = ops._product(x, pair, Epilogue(gate=True)).double()
    torch.testing.assert_close(gated, torch.nn.functional.silu(gate) * up, rtol=1e-3, atol=1e-2)
    found = ops.best(x, torch.ones(608, device=DEVICE), matrix)
    assert torch.equal(ops.pick(found).token, found.logits.argmax(dim=-1))


def test_a_draft_of_few_bits_loops_as_it_steps() -> None:
    model = tiny("llama", hidden_size=96, intermediate_size=96, num_hidden_layers=1).to(DEVICE)
    whole = NativeRunner.of_model(model, "tiny", 1024)
    weights = pack_weights(whole.weights, "int4", packed_weights)
    runner = NativeRunner(whole.shape, weights, model.config, whole.info, 1024)
    assert isinstance(runner.weights.head, PackedMatrix) and not runner.plain.node_by_node
    runner.narrow = DecodeGraphs(runner, ops_of(runner), ops_of(runner, vectors=True), 16, None)
    prompts = [torch.randint(0, 101, (length,)).tolist() for length in (9, 5)]
    seq_caches = [runner.new_cache() for _ in prompts]
    drafted = runner.loop([DraftInput(seq_cache, prompt) for seq_cache, prompt in zip(seq_caches, prompts)], 2)
    assert drafted is not None
    runner.narrow = None
    for row, prompt in enumerate(prompts):
        seq_cache, steps = runner.new_cache(), []
        output = runner.forward([Row.chain(seq_cache, prompt)], last_only=True)
        for _ in range(2):
            steps.append(int(output.logits[0].argmax()))
            output = runner.forward([Row.chain(seq_cache, steps[-1:])])
        assert drafted.tokens[row].tolist() == steps
