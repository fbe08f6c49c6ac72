"""The contract of Runner, checked for every implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.types import Capability, Row, SequenceCache
from tests.contracts.implementations import ARCHITECTURES, RUNNERS

IDS = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7]
OTHER_IDS = [27, 18, 28, 18]
TOLERANCE = 2e-4  # float32: another width adds in another order


@pytest.fixture(params=[*RUNNERS, *(pytest.param(name, marks=pytest.mark.slow) for name in ARCHITECTURES)])
def runner(request: pytest.FixtureRequest) -> Any:
    return (RUNNERS | ARCHITECTURES)[request.param]()


def read(runner: Any, tokens: list[int]) -> Tensor:
    """The truth to compare with: all tokens in one pass through a sequence cache of its own. [tokens, vocab]"""
    seq_cache = runner.new_cache()
    logits = runner.forward([Row.chain(seq_cache, tokens)]).logits.clone()
    runner.free(seq_cache)
    return logits


def filled(runner: Any, tokens: list[int]) -> SequenceCache:
    seq_cache: SequenceCache = runner.new_cache()
    runner.forward([Row.chain(seq_cache, tokens)])
    runner.commit(seq_cache, list(range(len(tokens))))
    return seq_cache


def next_logits(runner: Any, seq_cache: SequenceCache, token: int) -> Tensor:
    return runner.forward([Row.chain(seq_cache, [token])]).logits[-1]


def test_a_new_cache_is_empty(runner: Any) -> None:
    assert runner.new_cache().length == 0


def test_one_by_one_is_the_same_as_at_once(runner: Any) -> None:
    seq_cache, logits = runner.new_cache(), []
    for token in IDS:
        logits.append(next_logits(runner, seq_cache, token).clone())
        runner.commit(seq_cache, [0])
    assert seq_cache.length == len(IDS)
    assert torch.allclose(torch.stack(logits), read(runner, IDS), atol=TOLERANCE)


def test_last_only_returns_the_last_node(runner: Any) -> None:
    one, other = runner.new_cache(), runner.new_cache()
    output = runner.forward([Row.chain(one, IDS), Row.chain(other, OTHER_IDS)], last_only=True)
    assert output.sizes == [1, 1]
    assert torch.allclose(output[0].logits[0], read(runner, IDS)[-1], atol=TOLERANCE)
    assert torch.allclose(output[1].logits[0], read(runner, OTHER_IDS)[-1], atol=TOLERANCE)


def test_sequences_of_different_lengths_and_sizes_share_a_pass(runner: Any) -> None:
    one, other, new = filled(runner, IDS[:6]), filled(runner, OTHER_IDS[:1]), runner.new_cache()
    rows = [Row.chain(one, IDS[6:]), Row.chain(other, OTHER_IDS[1:3]), Row.chain(new, IDS)]
    output = runner.forward(rows)
    assert output.sizes == [4, 2, 10]
    assert torch.allclose(output[0].logits, read(runner, IDS)[6:], atol=TOLERANCE)
    assert torch.allclose(output[1].logits, read(runner, OTHER_IDS)[1:3], atol=TOLERANCE)
    assert torch.allclose(output[2].logits, read(runner, IDS), atol=TOLERANCE)


def test_outputs_are_in_the_order_of_rows(runner: Any) -> None:
    seq_caches = [filled(runner, IDS[: 2 + n]) for n in range(4)]
    order = [2, 0, 3]
    output = runner.forward([Row.chain(seq_caches[n], [7]) for n in order])
    for place, n in enumerate(order):
        assert torch.allclose(output[place].logits[0], read(runner, [*IDS[: 2 + n], 7])[-1], atol=TOLERANCE)


def test_a_node_of_a_tree_sees_its_own_path_only(runner: Any) -> None:
    if Capability.TREE not in runner.capabilities:
        pytest.skip("this runner has no Capability.TREE")
    seq_cache = filled(runner, IDS[:5])
    tokens, parents = [1, 2, 3, 4, 5], [-1, 0, -1, 2, 0]
    output = (runner.forward([Row(seq_cache, torch.tensor(tokens), parents)])).logits
    for node, path in enumerate([[1], [1, 2], [3], [3, 4], [1, 5]]):
        assert torch.allclose(output[node], read(runner, IDS[:5] + path)[-1], atol=TOLERANCE), f"node {node}"


def test_a_tree_may_begin_a_sequence(runner: Any) -> None:
    if Capability.TREE not in runner.capabilities:
        pytest.skip("this runner has no Capability.TREE")
    output = (runner.forward([Row(runner.new_cache(), torch.tensor([1, 2, 3]), [-1, -1, 1])])).logits
    assert torch.allclose(output[2], read(runner, [2, 3])[-1], atol=TOLERANCE)


def test_commit_keeps_one_path_of_a_tree(runner: Any) -> None:
    if Capability.TREE not in runner.capabilities:
        pytest.skip("this runner has no Capability.TREE")
    seq_cache = filled(runner, IDS[:5])
    runner.forward([Row(seq_cache, torch.tensor([1, 2, 3, 4]), [-1, 0, -1, 2])])
    runner.commit(seq_cache, [2, 3])
    assert seq_cache.length == 7
    assert torch.allclose(next_logits(runner, seq_cache, 9), read(runner, [*IDS[:5], 3, 4, 9])[-1], atol=TOLERANCE)


def test_commit_may_keep_nothing_of_a_row(runner: Any) -> None:
    seq_cache = filled(runner, IDS[:5])
    runner.forward([Row.chain(seq_cache, [1, 2])])
    runner.commit(seq_cache, [])
    assert seq_cache.length == 5
    assert torch.allclose(next_logits(runner, seq_cache, 9), read(runner, [*IDS[:5], 9])[-1], atol=TOLERANCE)


def test_a_row_that_is_not_committed_is_kept_as_a_whole(runner: Any) -> None:
    seq_cache = filled(runner, IDS[:5])
    runner.forward([Row.chain(seq_cache, [1, 2])])
    assert seq_cache.length == 7
    runner.truncate(seq_cache, 6)
    assert torch.allclose(next_logits(runner, seq_cache, 9), read(runner, [*IDS[:5], 1, 9])[-1], atol=TOLERANCE)


def test_truncate_forgets_and_never_adds(runner: Any) -> None:
    seq_cache = filled(runner, IDS)
    runner.truncate(seq_cache, 4)
    runner.truncate(seq_cache, 99)
    assert seq_cache.length == 4
    assert torch.allclose(next_logits(runner, seq_cache, 9), read(runner, [*IDS[:4], 9])[-1], atol=TOLERANCE)


def test_a_lead_comes_before_the_tokens(runner: Any) -> None:
    seq_cache = filled(runner, IDS[:5])
    output = (runner.forward([Row(seq_cache, torch.tensor([2]), [-1, 0], lead=1)])).logits
    assert torch.allclose(output[-1], read(runner, [*IDS[:5], 1, 2])[-1], atol=TOLERANCE)


def test_freed_memory_can_be_used_again(runner: Any) -> None:
    first, second = filled(runner, IDS), filled(runner, OTHER_IDS)
    runner.free(first)
    runner.free(first)  # twice is harmless
    third = filled(runner, OTHER_IDS[::-1])
    assert torch.allclose(next_logits(runner, second, 9), read(runner, [*OTHER_IDS, 9])[-1], atol=TOLERANCE)
    assert torch.allclose(next_logits(runner, third, 9), read(runner, [*OTHER_IDS[::-1], 9])[-1], atol=TOLERANCE)


def test_a_fork_is_independent(runner: Any) -> None:
    seq_cache = filled(runner, IDS)
    twin = runner.fork(seq_cache, 6)
    assert twin.length == 6
    assert torch.allclose(next_logits(runner, twin, 1), read(runner, [*IDS[:6], 1])[-1], atol=TOLERANCE)
    assert torch.allclose(next_logits(runner, seq_cache, 9), read(runner, [*IDS, 9])[-1], atol=TOLERANCE)


def test_a_long_sequence_outgrows_the_first_buffers(runner: Any) -> None:
    long = [(7 * n) % 50 for n in range(400)]
    seq_cache, short = filled(runner, long[:200]), filled(runner, OTHER_IDS)
    runner.forward([Row.chain(seq_cache, long[200:])])
    assert torch.allclose(next_logits(runner, seq_cache, 9), read(runner, [*long, 9])[-1], atol=TOLERANCE)
    assert torch.allclose(next_logits(runner, short, 9), read(runner, [*OTHER_IDS, 9])[-1], atol=TOLERANCE)


def test_there_are_free_tokens(runner: Any) -> None:
    assert runner.free_tokens() > 1000


def test_hidden_states_lead_to_the_logits(runner: Any) -> None:
    if Capability.HIDDEN_STATES not in runner.capabilities:
        pytest.skip("this runner has no Capability.HIDDEN_STATES")
    runner.expose(hidden=True, features=(0, 1, 2))
    one, other = runner.new_cache(), runner.new_cache()
    with torch.no_grad():
        output = runner.forward([Row.chain(one, IDS), Row.chain(other, OTHER_IDS)], last_only=True)
        assert output[0].hidden is not None and output[0].hidden.shape == (len(IDS), runner.info.hidden_size)
        features = output[1].features
        assert features is not None and features.shape == (len(OTHER_IDS), 3 * runner.info.hidden_size)
        assert torch.allclose(runner.lm_head(output[0].hidden)[-1], output[0].logits[0], atol=TOLERANCE)


def test_a_hidden_view_returns_states_and_the_runner_itself_does_not(runner: Any) -> None:
    if Capability.HIDDEN_STATES not in runner.capabilities:
        pytest.skip("this runner has no Capability.HIDDEN_STATES")
    view, seq_cache = runner.hidden_view(), runner.new_cache()
    with torch.no_grad():
        for chunk in (IDS[:4], IDS[4:]):
            output = view.forward([Row.chain(seq_cache, chunk)], last_only=True)
            view.commit(seq_cache, list(range(len(chunk))))
            assert output.hidden is not None and output.hidden.shape == (len(chunk), runner.info.hidden_size)
        assert torch.allclose(runner.lm_head(output.hidden)[-1], read(runner, IDS)[-1], atol=TOLERANCE)
        plain = runner.forward([Row.chain(runner.new_cache(), IDS)])
    assert plain.hidden is None or view is runner  # the toy returns its states always


def test_an_early_exit_shares_the_cache(runner: Any) -> None:
    """What the early layers wrote while drafting is what the whole model needs there."""
    if Capability.EARLY_EXIT not in runner.capabilities:
        pytest.skip("this runner has no Capability.EARLY_EXIT")
    seq_cache = filled(runner, IDS)
    early = runner.early_exit(min(2, runner.info.num_layers - 1))
    first = early.forward([Row.chain(seq_cache, [1])]).logits[-1]
    assert not torch.allclose(first, read(runner, [*IDS, 1])[-1], atol=TOLERANCE), "that is the whole model"
    early.forward([Row.chain(seq_cache, [2])])
    early.truncate(seq_cache, len(IDS))
    assert torch.allclose(next_logits(runner, seq_cache, 9), read(runner, [*IDS, 9])[-1], atol=TOLERANCE)


def test_blocks_in_use_follow_the_sequence_caches(runner: Any) -> None:
    size = runner.blocks.block_size
    seq_cache = filled(runner, [(7 * n) % 50 for n in range(size + 1)])
    assert runner.blocks.used == 2
    twin = runner.fork(seq_cache, size)
    assert runner.blocks.used in (2, 3)  # shared, or copied
    runner.truncate(seq_cache, size)
    runner.free(twin)
    assert runner.blocks.used == 1
    runner.free(seq_cache)
    runner.free(seq_cache)
    assert runner.blocks.used == 0
