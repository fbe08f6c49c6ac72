"""Layers with a window keep a part of the cache: long sequences, forks and cuts read what was given up again.

The reference is a runner whose pool holds everything, in float64.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.core.types import DraftInput, Row
from paceline.errors import OutOfMemory
from paceline.kv import window_blocks
from paceline.runners.native import NativeRunner
from paceline.runners.native import runner as native_runner
from tests.runners.native.test_layer_attention import runner_of

TOKENS = [(7 * place + place * place) % 101 for place in range(900)]


@pytest.fixture
def small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_pools(monkeypatch)


def shrink_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools of 11 blocks for windows of 16 tokens, and passes of 96 tokens."""
    monkeypatch.setattr(window_blocks, "MIN_SEQS", 2)
    monkeypatch.setattr(window_blocks, "PASS_TOKENS", 96)
    monkeypatch.setattr(native_runner, "PASS_TOKENS", 96)
    monkeypatch.setattr(native_runner, "REREAD_TOKENS", 96)


def expected(tokens: list[int]) -> Tensor:
    """Logits after the last token, from a pool that gives nothing up."""
    runner = runner_of("windows")
    return runner.forward([Row.chain(runner.new_cache(), tokens)], last_only=True).logits


def after(runner: NativeRunner, seq_cache: object, token: int) -> Tensor:
    return runner.forward([Row.chain(seq_cache, [token])]).logits  # type: ignore[arg-type]


def same(left: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=1e-9, atol=1e-9)


def gone(runner: NativeRunner, seq_cache: object) -> int:
    assert runner.kv.windowed is not None
    table = runner.kv.windowed.table(seq_cache)  # type: ignore[arg-type]
    return table.count(runner.kv.windowed.blocks.num_blocks)


@pytest.mark.slow
@pytest.mark.usefixtures("small_pools")
@pytest.mark.parametrize("by_node", [False, True], ids=["together", "node by node"])
def test_a_sequence_far_longer_than_the_pool_reads_on(by_node: bool) -> None:
    want = expected(TOKENS)
    runner = runner_of("windows")
    runner.eager.ops.attention.node_by_node = by_node
    assert runner.kv.windowed is not None
    assert runner.kv.windowed.num_tokens == 704 and runner.kv.num_tokens == 2560
    seq_cache = runner.new_cache()
    runner.forward([Row.chain(seq_cache, TOKENS[:-1])], last_only=True)
    same(after(runner, seq_cache, TOKENS[-1]), want)
    assert gone(runner, seq_cache) >= 4


@pytest.mark.slow
@pytest.mark.usefixtures("small_pools")
def test_a_fork_or_a_cut_far_back_reads_its_tokens_again() -> None:
    want = expected([*TOKENS[:130], 5])
    runner = runner_of("windows")
    parent = runner.new_cache()
    runner.forward([Row.chain(parent, TOKENS)], last_only=True)
    fork = runner.fork(parent, 130)
    assert runner.kv.lacks(fork)
    same(after(runner, fork, 5), want)
    same(after(runner, parent, 5), expected([*TOKENS, 5]))
    runner.truncate(parent, 130)
    same(after(runner, parent, 5), want)


@pytest.mark.slow
@pytest.mark.usefixtures("small_pools")
def test_what_a_tree_has_left_is_what_is_read_again() -> None:
    runner = runner_of("windows")
    seq_cache = runner.new_cache()
    runner.forward([Row.chain(seq_cache, TOKENS[:100])], last_only=True)
    runner.forward([Row(seq_cache, torch.tensor([6, 7, 8]), [-1, 0, 0, 1], lead=5)])
    runner.commit(seq_cache, [0, 2])
    runner.forward([Row.chain(seq_cache, TOKENS[:800])], last_only=True)
    runner.truncate(seq_cache, 110)
    assert runner.kv.lacks(seq_cache)
    same(after(runner, seq_cache, 9), expected([*TOKENS[:100], 5, 7, *TOKENS[:8], 9]))


@pytest.mark.usefixtures("small_pools")
def test_a_sequence_whose_window_does_not_fit_is_refused_and_no_other_is_lost() -> None:
    """Two windows of four blocks fit, or four sequences that have no more than two blocks each."""
    want, runner = expected([*TOKENS[:100], 5]), runner_of("windows", blocks=60)
    caches = [runner.new_cache() for _ in range(4)]
    for cache in caches:
        runner.forward([Row.chain(cache, TOKENS[:100])], last_only=True)
    further = Row.chain(runner.new_cache(), TOKENS[:100])
    with pytest.raises(OutOfMemory, match="no room for a further sliding window"):
        runner.forward([further], last_only=True)
    runner.free(caches.pop())
    runner.forward([further], last_only=True)
    for output in runner.forward([Row.chain(cache, [5]) for cache in (*caches, further.seq_cache)]):
        same(output.logits, want)


@pytest.mark.slow
@pytest.mark.usefixtures("small_pools")
def test_an_early_exit_never_reads_again_with_its_own_layers_only() -> None:
    runner = runner_of("windows")
    early, parent = runner.early_exit(1), runner.new_cache()
    runner.forward([Row.chain(parent, TOKENS)], last_only=True)
    fork = runner.fork(parent, 130)
    early.forward([Row.chain(fork, [5])])
    early.rollback_draft(fork, 130)
    same(after(runner, fork, 5), expected([*TOKENS[:130], 5]))


# --- fused kernels ----------------------------------------------------------------------------------------------------


def decoded(runner: NativeRunner, steps: int) -> list[Tensor]:
    """A long prompt, a wide pass, plain steps in a row, and draft tokens in a row."""
    seq_cache, draft_cache = runner.new_cache(), runner.new_cache()
    runner.forward([Row.chain(seq_cache, TOKENS)], last_only=True)
    wide = runner.forward([Row.chain(seq_cache, TOKENS[:5])]).logits.clone()
    written = runner.decode([Row.chain(seq_cache, [3])], steps)
    draft = runner.draft([DraftInput(draft_cache, TOKENS, 0.0, None)], steps)
    assert written is not None and draft is not None
    runner.truncate(seq_cache, 500)
    again = runner.forward([Row.chain(seq_cache, [3])]).logits.clone()
    return [wide, written, draft.tokens, again]


@pytest.mark.slow
def test_fused_passes_read_the_blocks_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from tests.runners.native.fused import eager_graphs

    outputs = []
    for small in (False, True):
        if small:
            shrink_pools(monkeypatch)
        runner = runner_of("windows", torch.float32)
        runner.decode_graphs = eager_graphs(runner)
        outputs.append(decoded(runner, 2))
    for left, right in zip(*outputs):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_captured_passes_read_the_blocks_that_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are cut at the same places, so that all bits are those of a pool that gives nothing up."""
    outputs = []
    for small in (False, True):
        if small:
            monkeypatch.setattr(window_blocks, "MIN_SEQS", 1)
            monkeypatch.setattr(window_blocks, "PASS_TOKENS", 512)
        runner = runner_of("windows", torch.bfloat16)
        runner._make_passes()
        seq_cache = runner.new_cache()
        for start in range(0, len(TOKENS), 300):
            runner.forward([Row.chain(seq_cache, TOKENS[start : start + 300])], last_only=True)
        outputs.append([runner.forward([Row.chain(seq_cache, [5, 6, 7])]).logits.clone()])
        outputs[-1].append(runner.decode([Row.chain(seq_cache, [3])], 40))
        assert (gone(runner, seq_cache) > 0) is small
    for left, right in zip(*outputs):
        assert torch.equal(left, right)
