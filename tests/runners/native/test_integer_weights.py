"""int8 and int4 weights on a CPU: a token is computed the same alone and among others, with a compiler and without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from paceline.core.types import Row, SequenceCache
from paceline.device.host_compiler import COMPILER_VARIABLE
from paceline.layers import cpu_kernels
from paceline.quantization.int4 import has_int4_kernel
from paceline.runners.native import NativeRunner
from tests.runners.native.models import tiny

FORMATS = ["int8", pytest.param("int4", marks=pytest.mark.skipif(not has_int4_kernel(), reason="no int4 kernel here"))]
COMPILERS = [pytest.param(None, marks=pytest.mark.skipif(cpu_kernels.library() is None, reason="no compiler")), "none"]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}


@pytest.fixture(autouse=True, params=COMPILERS, ids=["compiled", "torch"])
def _compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param is not None:
        monkeypatch.setenv(COMPILER_VARIABLE, request.param)
    cpu_kernels.library.cache_clear()
    yield
    cpu_kernels.library.cache_clear()


def quantized(weight_format: str, kv_cache_tokens: int) -> NativeRunner:
    return NativeRunner.of_model(tiny(**SIZES), "tiny", kv_cache_tokens, weight_format=weight_format)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_chain_is_the_same_bits_at_every_width(weight_format: str) -> None:
    runner = quantized(weight_format, 512)
    seq_cache = runner.new_cache()
    runner.forward([Row.chain(seq_cache, list(range(30)))], last_only=True)
    tokens = [3, 14, 15, 92, 65]
    together = runner.forward([Row.chain(seq_cache, tokens)]).logits
    runner.truncate(seq_cache, 30)
    alone = torch.cat([runner.forward([Row.chain(seq_cache, [token])]).logits for token in tokens])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("length", [30, 61, 64])
def test_a_tree_is_the_same_bits_as_its_paths(weight_format: str, length: int) -> None:
    """Also where a block ends inside the tree; and after an accepted branch the sequence is as without a tree."""
    runner = quantized(weight_format, 512)
    tokens, parents = [3, 14, 15, 92, 65, 35], [-1, 0, 1, 0, 3, 2]
    seq_cache, other = runner.new_cache(), runner.new_cache()
    for each in (seq_cache, other):
        runner.forward([Row.chain(each, list(range(length)))], last_only=True)
    together = runner.forward([Row(seq_cache, torch.tensor(tokens), parents)]).logits
    for path in ([0, 1, 2, 5], [0, 3, 4]):
        runner.truncate(other, length)
        alone = torch.cat([runner.forward([Row.chain(other, [tokens[node]])]).logits for node in path])
        assert torch.equal(together[path], alone)
    runner.commit(seq_cache, [0, 3, 4])
    after, expected = (runner.forward([Row.chain(cache, [7])]).logits for cache in (seq_cache, other))
    assert torch.equal(after, expected)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_prompt_is_the_same_bits_whatever_is_read_beside_it(weight_format: str) -> None:
    runner = quantized(weight_format, 2048)
    prompt = [(7 * n) % 90 for n in range(150)]
    whole = runner.forward([Row.chain(runner.new_cache(), prompt)], last_only=True).logits
    seq_cache, other = runner.new_cache(), runner.new_cache()
    runner.forward([Row.chain(seq_cache, prompt[:64]), Row.chain(other, prompt[5:40])], last_only=True)
    cut = runner.forward([Row.chain(other, prompt[:3]), Row.chain(seq_cache, prompt[64:])], last_only=True).logits[1:]
    assert torch.equal(whole, cut)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_token_is_the_same_bits_whatever_is_read_beside_it(weight_format: str) -> None:
    """Sequences that fill as many blocks are batched, others are not: no bits may tell which."""
    runner = quantized(weight_format, 4096)
    prompts = [[(7 * n + length) % 90 for n in range(length)] for length in (10, 70, 62, 100, 63, 64, 300)]
    steps = ([3], [14], [15, 92])  # in the last step the second sequence has draft tokens

    def rows(seq_caches: list[SequenceCache], tokens: list[int]) -> list[Row]:
        counts = [len(tokens) if place == 1 else 1 for place in range(len(seq_caches))]
        return [Row.chain(seq_cache, tokens[:count]) for seq_cache, count in zip(seq_caches, counts)]

    batched, single = ([runner.new_cache() for _ in prompts] for _ in range(2))
    for seq_caches in (batched, single):
        for seq_cache, prompt in zip(seq_caches, prompts):
            runner.forward([Row.chain(seq_cache, prompt)], last_only=True)
    for tokens in steps:
        together = runner.forward(rows(batched, tokens)).logits
        alone = torch.cat([runner.forward([row]).logits for row in rows(single, tokens)])
        assert torch.equal(together, alone)
