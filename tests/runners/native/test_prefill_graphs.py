"""First prefills, padded to fixed sizes, against the eager pass. With an eager pool nothing is captured."""

from __future__ import annotations

import pytest
import torch

from paceline.core.types import ModelOutput, Row, SequenceCache
from paceline.device.graphs import EagerPool
from paceline.runners.native import NativeRunner
from paceline.runners.native.prefill_graphs import SIZES, PrefillGraphs
from tests.runners.native.models import tiny

LENGTHS = (3, 32, 33, 150)


def runner_with(graphs: bool) -> NativeRunner:
    runner = NativeRunner.of_model(tiny("llama"), "tiny", kv_cache_tokens=1024)
    runner.expose(hidden=True, features=(1,))
    parts = (runner.model, runner.kv, runner.eager.ops, runner._rope_cache, runner.options)
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
    assert runner.kv.keys[:, runner.kv.padding_slot].abs().sum() > 0  # this is where it went


def test_later_reads_and_long_prompts_take_another_pass() -> None:
    runner = runner_with(True)
    graphs = runner.prefill_graphs
    assert graphs is not None
    seq_cache = runner.new_cache()
    assert graphs.fits([Row.chain(seq_cache, [1, 2, 3, 4])], True)
    assert not graphs.fits([Row.chain(seq_cache, [1, 2, 3, 4])], False)  # all logits are asked for
    assert not graphs.fits([Row.chain(seq_cache, [1] * (SIZES[-1] + 1))], True)
    runner.forward([Row.chain(seq_cache, [1, 2, 3, 4])], last_only=True)
    assert not graphs.fits([Row.chain(seq_cache, [5, 6, 7, 8])], True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_prefills_are_repeatable_on_the_device() -> None:
    runner = NativeRunner.of_model(tiny("llama", torch.bfloat16).to("cuda"), "tiny", kv_cache_tokens=2048)
    prompt = torch.randint(0, 101, (100,)).tolist()
    first, again = (read(runner, [prompt])[1].logits.clone() for _ in range(2))
    runner.prefill_graphs = None
    assert torch.equal(first, again)
    torch.testing.assert_close(first.float(), read(runner, [prompt])[1].logits.float(), rtol=5e-2, atol=5e-2)
