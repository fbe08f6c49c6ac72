"""Layers as one call of compiled code: the same numbers as operation by operation, whatever is in a pass."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from paceline.core.types import ModelOutput, Row
from paceline.layers import cpu_kernels
from paceline.layers.cpu_kernels import compile_kernels
from paceline.runners.native import NativeRunner
from paceline.runners.native.kv_cache import NativeSequenceCache
from tests.layers.test_cpu_kernels import FORMS, needs_x86
from tests.runners.native.models import tiny

pytestmark = pytest.mark.skipif(cpu_kernels.library() is None, reason="no compiled kernels on this machine")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
FORMATS = ["int8", "int4", None]
TREE = [3, 14, 15, 92, 65, 35], [-1, 0, 1, 0, 3, 2]


def runner_of(
    kind: str = "llama", weight_format: str | None = "int8", kv_cache_tokens: int = 2048, **changes: Any
) -> NativeRunner:
    model = tiny(kind, **(SIZES | changes))
    runner = NativeRunner.of_model(model, "tiny", kv_cache_tokens, weight_format=weight_format)
    assert runner.eager._compiled is not None
    return runner


def eager(runner: NativeRunner) -> NativeRunner:
    """The same weights, operation by operation."""
    twin = NativeRunner(runner.model, runner.info, runner.blocks)
    twin.eager._compiled = None
    return twin


def close(output: ModelOutput, expected: ModelOutput, limit: float) -> None:
    """Integer weights: but for inputs of products that a last bit rounds to the next of 255 values."""
    error = (output.logits - expected.logits).norm() / expected.logits.norm()
    assert error < limit


@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("head_dim", [16, 32, 80])
def test_layers_agree_with_the_eager_operations(kind: str, weight_format: str | None, head_dim: int) -> None:
    compiled = runner_of(kind, weight_format, head_dim=head_dim)
    outputs = []
    for runner in (compiled, eager(compiled)):
        first, second = runner.new_cache(), runner.new_cache()
        prompt = runner.forward([Row.chain(first, list(range(70))), Row.chain(second, [5, 6, 7])], last_only=True)
        tree = runner.forward([Row(first, torch.tensor(TREE[0]), TREE[1]), Row.chain(second, [8, 9])])
        runner.commit(first, [0, 3, 4])
        outputs.append([prompt, tree, runner.forward([Row.chain(first, [1])])])
    for output, expected in zip(*outputs):
        close(output, expected, 1e-5 if weight_format is None else 0.03)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_a_prompt_is_the_same_bits_token_by_token(weight_format: str | None) -> None:
    """Stronger than at the edges of blocks: how a prompt is cut does not matter at all."""
    runner, prompt = runner_of(weight_format=weight_format), [(7 * n) % 90 for n in range(80)]
    runner.expose(features=(2,))  # in float32 the LM head is torch's product, and rounds by its width
    whole = runner.forward([Row.chain(runner.new_cache(), prompt)])
    seq_cache = runner.new_cache()
    single = [runner.forward([Row.chain(seq_cache, [token])]) for token in prompt]
    assert whole.features is not None
    assert torch.equal(whole.features, torch.cat([output.features for output in single]))
    if weight_format is not None:
        assert torch.equal(whole.logits, torch.cat([output.logits for output in single]))


def test_sequences_whose_blocks_are_scattered() -> None:
    """Three sequences grow in turns in a cache with no room to spare."""
    runner, prompt = runner_of(kv_cache_tokens=9 * 64), [(7 * n) % 90 for n in range(150)]
    seq_caches = [runner.new_cache() for _ in range(3)]
    for start in range(0, 150, 50):
        rows = [Row.chain(seq_cache, prompt[start : start + 50]) for seq_cache in seq_caches]
        logits = torch.cat([runner.forward([row], last_only=True).logits for row in rows])
    tables = [runner.blocks.table(seq_cache) for seq_cache in seq_caches]
    assert any(after - before != 1 for table in tables for before, after in pairwise(table))
    whole = runner_of().forward([Row.chain(NativeSequenceCache(), prompt)], last_only=True).logits
    assert torch.equal(logits, whole.expand(3, -1))


def test_hidden_states_of_chosen_layers_are_those_that_enter_them() -> None:
    compiled = runner_of()
    outputs = []
    for runner in (compiled, eager(compiled)):
        runner.expose(hidden=True, features=(0, 1, 2))
        outputs.append(runner.forward([Row.chain(runner.new_cache(), [1, 2, 3])]))
    ours, expected = (output.features for output in outputs)
    assert ours is not None and expected is not None and ours.shape == expected.shape
    assert torch.equal(ours[:, :64], compiled.embed(torch.tensor([1, 2, 3])))
    assert (ours - expected).norm() / expected.norm() < 0.01


def test_verification_resumes_from_an_exit_with_the_same_bits() -> None:
    runner = runner_of()
    early, seq_cache, other = runner.early_exit(1), runner.new_cache(), runner.new_cache()
    for each in (seq_cache, other):
        runner.forward([Row.chain(each, list(range(30)))], last_only=True)
    for token in (4, 9, 2):
        early.forward([Row.chain(seq_cache, [token])])
        early.commit(seq_cache, [0])
    early.rollback_draft(seq_cache, 30)
    resumed = runner.forward([Row.chain(seq_cache, [4, 9, 2, 8])])
    assert torch.equal(resumed.logits, runner.forward([Row.chain(other, [4, 9, 2, 8])]).logits)


def test_models_that_the_kernels_do_not_take_run_operation_by_operation() -> None:
    for changes in ({"head_dim": 8}, {"intermediate_size": 80}):
        runner = NativeRunner.of_model(tiny(**(SIZES | changes)), "tiny", 256, weight_format="int8")
        assert runner.eager._compiled is None
        assert runner.forward([Row.chain(runner.new_cache(), [1, 2, 3])]).logits.isfinite().all()


@needs_x86
@pytest.mark.slow  # compiles all kernels
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_attention_gives_the_same_bits(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Query heads that share a key head are scored together: by ones to fours, and sevens in two parts."""
    prompt, compiled = [(7 * n) % 90 for n in range(75)], compile_kernels(FORMS[form])
    for group in (1, 2, 3, 4, 7):
        heads = {"num_attention_heads": 2 * group, "num_key_value_heads": 2, "head_dim": 80}
        runner, outputs = runner_of("qwen3", **heads), []
        for library in (cpu_kernels.library(), compiled):
            with monkeypatch.context() as patched:
                patched.setattr(cpu_kernels, "library", lambda library=library: library)
                seq_cache = runner.new_cache()
                runner.forward([Row.chain(seq_cache, prompt)], last_only=True)
                outputs.append(runner.forward([Row(seq_cache, torch.tensor(TREE[0]), TREE[1])]).logits)
        assert torch.equal(*outputs), f"{group} query heads share a key head"


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 9, 16, 17])
def test_attention_is_the_same_bits_however_it_is_dealt_out(nodes: int) -> None:
    """Three key heads do not divide evenly among two threads: keys and columns are divided, or tiles of nodes."""
    runner = runner_of("qwen3", num_attention_heads=9, num_key_value_heads=3, head_dim=32)
    seq_cache, threads, outputs = runner.new_cache(), torch.get_num_threads(), []
    runner.forward([Row.chain(seq_cache, list(range(70)))], last_only=True)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            outputs.append(runner.forward([Row.chain(seq_cache, list(range(nodes)))]).logits)
            runner.truncate(seq_cache, 70)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
