"""int8 and int4 products: close to the real ones, and the same for a token alone and among others."""

from __future__ import annotations

import pytest
import torch

from paceline.core import Row
from paceline.core.types import SequenceCache
from paceline.runners.native import NativeRunner
from paceline.runners.native.loading import pack_weights
from paceline.runners.native.quantization import has_int4, packed
from tests.runners.native.models import tiny

WORDS = ["int8", pytest.param("int4", marks=pytest.mark.skipif(not has_int4(), reason="no int4 kernel here"))]
ERROR = {"int8": 0.02, "int4": 0.15}


@pytest.mark.parametrize("word", WORDS)
def test_a_product_is_close(word: str) -> None:
    weight = torch.randn(96, 64) * torch.rand(96, 1)
    x = torch.randn(5, 64) * torch.tensor([[1.0], [100.0], [1.0], [0.01], [1.0]])
    exact = x @ weight.T
    error = (packed(weight, word)(x, None) - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert error.max() < ERROR[word]  # also for the token a hundred times larger than its neighbours


@pytest.mark.parametrize("word", WORDS)
def test_a_chain_says_the_same_at_every_width(word: str) -> None:
    model = tiny(hidden_size=64, intermediate_size=96, num_attention_heads=4)
    runner = NativeRunner.of_model(model, "tiny", kv_cache_tokens=512)
    small = NativeRunner(runner.shape, pack_weights(runner.weights, word), model.config, runner.info, 512)
    seq_cache = small.open()
    small.forward([Row.chain(seq_cache, list(range(30)))], last_only=True)
    tokens = [3, 14, 15, 92, 65]
    together = small.forward([Row.chain(seq_cache, tokens)]).logits
    small.trim(seq_cache, 30)
    alone = torch.cat([small.forward([Row.chain(seq_cache, [token])]).logits for token in tokens])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("length", [30, 61, 64])
def test_a_tree_says_the_same_as_its_paths(word: str, length: int) -> None:
    """Also where a page ends inside the tree; and the text that follows an accepted branch is as if none had been."""
    model = tiny(hidden_size=64, intermediate_size=96, num_attention_heads=4)
    runner = NativeRunner.of_model(model, "tiny", kv_cache_tokens=512)
    small = NativeRunner(runner.shape, pack_weights(runner.weights, word), model.config, runner.info, 512)
    tokens, parents = [3, 14, 15, 92, 65, 35], [-1, 0, 1, 0, 3, 2]
    seq_cache, other = small.open(), small.open()
    for each in (seq_cache, other):
        small.forward([Row.chain(each, list(range(length)))], last_only=True)
    together = small.forward([Row(seq_cache, torch.tensor(tokens), parents)]).logits
    for path in ([0, 1, 2, 5], [0, 3, 4]):
        small.trim(other, length)
        alone = torch.cat([small.forward([Row.chain(other, [tokens[node]])]).logits for node in path])
        assert torch.equal(together[path], alone)
    small.commit(seq_cache, [0, 3, 4])
    assert torch.equal(small.forward([Row.chain(seq_cache, [7])]).logits, small.forward([Row.chain(other, [7])]).logits)


@pytest.mark.parametrize("word", WORDS)
def test_a_prompt_says_the_same_whatever_is_read_beside_it(word: str) -> None:
    model = tiny(hidden_size=64, intermediate_size=96, num_attention_heads=4)
    runner = NativeRunner.of_model(model, "tiny", kv_cache_tokens=2048)
    small = NativeRunner(runner.shape, pack_weights(runner.weights, word), model.config, runner.info, 2048)
    prompt = [(7 * n) % 90 for n in range(150)]
    whole = small.forward([Row.chain(small.open(), prompt)], last_only=True).logits
    seq_cache, other = small.open(), small.open()
    small.forward([Row.chain(seq_cache, prompt[:64]), Row.chain(other, prompt[5:40])], last_only=True)
    cut = small.forward([Row.chain(other, prompt[:3]), Row.chain(seq_cache, prompt[64:])], last_only=True).logits[1:]
    assert torch.equal(whole, cut)


@pytest.mark.parametrize("word", WORDS)
def test_a_token_says_the_same_whatever_is_read_beside_it(word: str) -> None:
    """Texts that fill as many pages look back together, others by themselves: nobody's bits may tell which."""
    model = tiny(hidden_size=64, intermediate_size=96, num_attention_heads=4)
    runner = NativeRunner.of_model(model, "tiny", kv_cache_tokens=4096)
    small = NativeRunner(runner.shape, pack_weights(runner.weights, word), model.config, runner.info, 4096)
    prompts = [[(7 * n + length) % 90 for n in range(length)] for length in (10, 70, 62, 100, 63, 64, 300)]
    rounds = ([3], [14], [15, 92])  # in the last one the second text is given guesses

    def rows(seq_caches: list[SequenceCache], tokens: list[int]) -> list[Row]:
        return [Row.chain(seq_cache, tokens if place == 1 else tokens[:1]) for place, seq_cache in enumerate(seq_caches)]

    crowd, loners = ([small.open() for _ in prompts] for _ in range(2))
    for seq_caches in (crowd, loners):
        for seq_cache, prompt in zip(seq_caches, prompts):
            small.forward([Row.chain(seq_cache, prompt)], last_only=True)
    for tokens in rounds:
        together = small.forward(rows(crowd, tokens)).logits
        alone = torch.cat([small.forward([row]).logits for row in rows(loners, tokens)])
        assert torch.equal(together, alone)
