"""A memoized runner gives the outputs of the runner inside it, and computes each prefix once."""

from __future__ import annotations

import pytest
import torch

from paceline.bench.memoized_runner import MemoizedRunner
from paceline.core.protocols import Runner
from paceline.core.types import ModelOutput, Row
from paceline.runners.native import NativeRunner
from paceline.runners.table import TableRunner
from tests.support.tiny import tiny_llama

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]


def test_outputs_are_those_of_the_inner_runner() -> None:
    inner, memoized = TableRunner(seed=5), MemoizedRunner(TableRunner(seed=5))
    caches = inner.new_cache(), memoized.new_cache()
    for tokens, parents, nodes in (
        ([1, 2, 3], [-1, 0, 1], [0, 1, 2]),
        ([4, 0, 2], [-1, 0, 0], [0, 2]),
        ([1], [-1], [0]),
    ):
        logits = []
        for runner, seq_cache in zip((inner, memoized), caches):
            logits.append(runner.forward([Row(seq_cache, torch.tensor(tokens), parents)]).logits)
            runner.commit(seq_cache, nodes)
        assert logits[0].equal(logits[1])
        assert caches[0].length == caches[1].length


def test_caches_are_truncated_and_forked_and_a_known_prefix_costs_no_pass() -> None:
    memoized = MemoizedRunner(TableRunner(seed=5))
    seq_cache = memoized.new_cache()
    memoized.forward([Row.chain(seq_cache, [1, 2, 3, 4])])
    memoized.truncate(seq_cache, 3)
    assert seq_cache.tokens == [1, 2, 3]
    fork = memoized.fork(seq_cache, 2)
    assert (fork.tokens, fork.length) == ([1, 2], 2)
    passes = memoized.passes
    memoized.forward([Row.chain(fork, [3])])
    assert memoized.passes == passes


def read_prompts_then_tree(runner: Runner) -> tuple[ModelOutput, ModelOutput]:
    caches = [runner.new_cache() for _ in PROMPTS]
    prefill = runner.forward([Row.chain(seq_cache, ids) for seq_cache, ids in zip(caches, PROMPTS)], last_only=True)
    for seq_cache, ids in zip(caches, PROMPTS):
        runner.commit(seq_cache, list(range(len(ids))))
    tree = runner.forward([Row(seq_cache, torch.tensor([5, 6, 7]), [-1, 0, 0]) for seq_cache in caches])
    return prefill, tree


@pytest.mark.slow
def test_stored_hidden_states_are_the_real_ones() -> None:
    inner = NativeRunner.of_model(tiny_llama(), "tiny", kv_cache_tokens=1024)
    inner.expose(hidden=True, features=(1,))
    memoized = MemoizedRunner(inner, states=True)
    for _ in range(2):  # the second time from stored outputs
        for real, stored in zip(read_prompts_then_tree(inner), read_prompts_then_tree(memoized)):
            assert (real.sizes, real.read or real.sizes) == (stored.sizes, stored.read)
            for part in ("logits", "hidden", "features"):
                torch.testing.assert_close(getattr(stored, part), getattr(real, part), rtol=1e-4, atol=1e-5)
    assert memoized.passes == 2 * len(PROMPTS)


def test_a_restricted_runner_is_the_model_without_its_other_tokens() -> None:
    """Token ids are indices of the restricted vocabulary; logits are the inner model's at those tokens."""
    inner, tokens = TableRunner(vocab_size=9, seed=2), [7, 3, 0, 4]
    restricted = MemoizedRunner(inner, tokens)
    logits = restricted.forward([Row.chain(restricted.new_cache(), [1, 0, 3])]).logits
    assert logits.equal(inner.forward([Row.chain(inner.new_cache(), [3, 7, 4])]).logits[:, tokens])
    assert (restricted.info.vocab_size, restricted.info.eos_token_ids) == (4, frozenset())


def test_an_early_exit_is_memoized_too() -> None:
    inner = TableRunner(vocab_size=5, seed=3)
    early_exit = MemoizedRunner(inner, states=True).early_exit(2)
    logits = early_exit.forward([Row.chain(early_exit.new_cache(), [1, 2])]).logits
    expected = inner.early_exit(2)
    assert logits.equal(expected.forward([Row.chain(expected.new_cache(), [1, 2])]).logits)
