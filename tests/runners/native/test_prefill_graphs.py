"""Prefills in chunks, padded to fixed sizes, against the eager pass. With an eager pool nothing is captured."""

from __future__ import annotations

import pytest
import torch

from paceline.core.types import ModelOutput, Row, SequenceCache, WarmupPlan
from paceline.device.graphs import EagerPool
from paceline.runners.native import NativeRunner
from paceline.runners.native.prefill_graphs import CONTEXTS, LATER_SIZES, MAX_GRAPHS, SIZES, PrefillGraphs
from tests.runners.native.models import tiny

LENGTHS = (3, 32, 33, 150)


def runner_with(graphs: bool, tokens: int = 1024) -> NativeRunner:
    runner = NativeRunner.of_model(tiny("llama"), "tiny", kv_cache_tokens=tokens)
    runner.expose(hidden=True, features=(1,))
    parts = (runner.model, runner.kv, runner.eager.ops, runner._rope_caches, runner.options)
    runner.prefill_graphs = PrefillGraphs(*parts, EagerPool()) if graphs else None
    return runner


def read(runner: NativeRunner, prompts: list[list[int]]) -> tuple[list[SequenceCache], ModelOutput]:
    seq_caches = [runner.new_cache() for _ in prompts]
    rows = [Row.chain(seq_cache, prompt) for seq_cache, prompt in zip(seq_caches, prompts)]
    return seq_caches, runner.forward(rows, last_only=True)


def test_a_batch_of_first_prefills_is_what_the_eager_pass_computes() -> None:
    prompts = [torch.randint(0, 101, (length,)).tolist() for length in LENGTHS]
    eager, captured = runner_with(False), runner_with(True)
    (seq_caches, expected), (captured_caches, output) = read(eager, prompts), read(captured, prompts)
    assert output.sizes == expected.sizes and output.read == expected.read == list(LENGTHS)
    pairs = ((output.logits, expected.logits), (output.hidden, expected.hidden), (output.features, expected.features))
    for ours, theirs in pairs:
        assert ours is not None and theirs is not None
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    after = eager.forward([Row.chain(seq_cache, [7, 8]) for seq_cache in seq_caches]).logits
    own = captured.forward([Row.chain(seq_cache, [7, 8]) for seq_cache in captured_caches]).logits
    torch.testing.assert_close(own, after, rtol=1e-4, atol=1e-5)


def test_padding_touches_no_block_of_another_sequence() -> None:
    runner = runner_with(True)
    [first], _ = read(runner, [list(range(1, 60))])
    start = runner.blocks.table(first)[0] * runner.blocks.block_size
    before = runner.kv.keys[:, start : start + 59].clone()
    read(runner, [[5] * 70])
    assert torch.equal(before, runner.kv.keys[:, start : start + 59])
    assert runner.kv.keys[:, runner.kv.full.padding_slot].abs().sum() > 0  # this is where it went


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [(70, 100), (5, 600), (600, 3, 40), (1100,), (1030, 64)])
def test_chunks_behind_a_context_are_what_the_eager_pass_computes(lengths: tuple[int, ...]) -> None:
    """Continued prompts and prompts longer than the largest size: logits, states, and what later tokens see of them."""
    eager, captured = runner_with(False, 2048), runner_with(True, 2048)
    blocker = [runner.new_cache() for runner in (eager, captured)]
    caches = [runner.new_cache() for runner in (eager, captured)]
    for runner, seq_cache in zip((eager, captured), blocker):  # so that the blocks below are no neighbours
        runner.forward([Row.chain(seq_cache, list(range(1, 40)))], last_only=True)
    for length in lengths:
        tokens = torch.randint(0, 101, (length,)).tolist()
        rows = [Row.chain(seq_cache, tokens) for seq_cache in caches]
        assert captured.prefill_graphs is not None and captured.prefill_graphs.fits([rows[1]], True)
        expected, output = (runner.forward([row], last_only=True) for runner, row in zip((eager, captured), rows))
        assert output.read == expected.read == [length] and output.sizes == expected.sizes
        for ours, theirs in zip(_parts(output), _parts(expected)):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    after = [runner.forward([Row.chain(cache, [7, 8])]).logits for runner, cache in zip((eager, captured), caches)]
    torch.testing.assert_close(after[1], after[0], rtol=1e-4, atol=1e-4)


def _parts(output: ModelOutput) -> list[torch.Tensor]:
    assert output.hidden is not None and output.features is not None
    return [output.logits, output.hidden, output.features]


def test_the_number_of_graphs_is_bounded_whatever_lengths_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is prepared at once; then prompts of any length and any context find their graph."""
    runner = runner_with(True, 4096)
    graphs = runner.prefill_graphs
    assert graphs is not None
    monkeypatch.setattr(graphs, "_work", lambda inputs: None)
    for prepare in graphs.preparations(4096):
        prepare()
    prepared = len(graphs._graphs)
    assert prepared == len(SIZES) + 3 * len(LATER_SIZES) <= MAX_GRAPHS
    for count in range(1, SIZES[-1] + 1, 37):
        for context in (0, 1, 500, 600, 2048, 3000):
            graphs._graph(graphs._key(count, context))
    assert len(graphs._graphs) == prepared


def test_a_runner_prepares_its_prefills_up_to_what_its_cache_holds() -> None:
    runner = runner_with(True, 256)
    assert runner.prefill_graphs is not None
    for prepare in runner.preparations(WarmupPlan((1,), (), 4096)):
        prepare()
    assert len(runner.prefill_graphs._graphs) == 6 + 2, "sizes up to 256, and two behind the one context that fits"


def test_other_passes_are_left_to_others() -> None:
    runner = runner_with(True)
    graphs = runner.prefill_graphs
    assert graphs is not None
    seq_cache = runner.new_cache()
    assert graphs.fits([Row.chain(seq_cache, [1, 2, 3, 4])], True)
    assert not graphs.fits([Row.chain(seq_cache, [1, 2, 3, 4])], False)  # all logits are asked for
    seq_cache.length = CONTEXTS[-1] + 1
    assert not graphs.fits([Row.chain(seq_cache, [1, 2, 3, 4])], True)  # a context that no graph holds


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_prefills_are_repeatable_on_the_device() -> None:
    runner = NativeRunner.of_model(tiny("llama", torch.bfloat16).to("cuda"), "tiny", kv_cache_tokens=2048)
    prompt = torch.randint(0, 101, (100,)).tolist()
    first, again = (read(runner, [prompt])[1].logits.clone() for _ in range(2))
    runner.prefill_graphs = None
    assert torch.equal(first, again)
    torch.testing.assert_close(first.float(), read(runner, [prompt])[1].logits.float(), rtol=5e-2, atol=5e-2)
