"""The native runner beyond the contract: its blocks, what it loads, and early exits. On any device, without graphs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.core.types import Capability, Row
from paceline.errors import OptionError, OutOfMemory, WeightsError
from paceline.runners.native import NativeRunner, is_native
from tests.runners.native.models import KINDS, tiny

PROMPTS = [list(range(3, 40)), [7, 7, 9], list(range(90, 20, -1))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind: str) -> None:
    model = tiny(kind)
    runner = NativeRunner.of_model(model, kind, kv_cache_tokens=2048)
    outputs = runner.forward([Row.chain(runner.new_cache(), prompt) for prompt in PROMPTS])
    for output, prompt in zip(outputs, PROMPTS):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-4)


def test_hidden_states_and_features_are_returned() -> None:
    model = tiny()
    runner = NativeRunner.of_model(model, "tiny", kv_cache_tokens=512)
    runner.expose(hidden=True, features=(0, 1))
    output = runner.forward([Row.chain(runner.new_cache(), PROMPTS[0])], last_only=True)[0]
    with torch.no_grad():
        states = model(torch.tensor([PROMPTS[0]]), output_hidden_states=True).hidden_states
    assert output.hidden is not None and output.features is not None
    torch.testing.assert_close(output.hidden, states[-1][0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(output.features, torch.cat([states[0][0], states[1][0]], -1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(runner.lm_head(output.hidden[-1:]), output.logits, rtol=1e-4, atol=1e-4)


def test_sequences_whose_blocks_are_scattered() -> None:
    """Three sequences grow in turns in a cache with little room to spare; each must still read its own blocks."""
    model = tiny()
    runner = NativeRunner.of_model(model, "tiny", kv_cache_tokens=13 * 64)
    seq_caches = [runner.new_cache() for _ in PROMPTS]
    token_ids: list[list[int]] = [[] for _ in PROMPTS]
    for turn in range(5):
        for seq_cache, seq in zip(seq_caches, token_ids):
            new = [(turn * 31 + i * 7) % 101 for i in range(40)]
            runner.forward([Row.chain(seq_cache, new)], last_only=True)
            seq += new
    tables = [runner.blocks.table(seq_cache) for seq_cache in seq_caches]
    assert any(b - a != 1 for table in tables for a, b in pairwise(table))
    outputs = runner.forward([Row.chain(seq_cache, [5]) for seq_cache in seq_caches])
    for output, seq in zip(outputs, token_ids):
        with torch.no_grad():
            expected = model(torch.tensor([[*seq, 5]])).logits[0, -1:]
        torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-4)


def test_a_fork_shares_blocks_until_it_writes() -> None:
    runner = NativeRunner.of_model(tiny(), "tiny", kv_cache_tokens=1024)
    seq_cache = runner.new_cache()
    runner.forward([Row.chain(seq_cache, list(range(100)))], last_only=True)
    used = runner.blocks.used
    twin = runner.fork(seq_cache, 90)
    assert runner.blocks.used == used
    before = runner.forward([Row.chain(seq_cache, [1])]).logits.clone()
    runner.truncate(seq_cache, 100)
    runner.forward([Row.chain(twin, [50] * 20)], last_only=True)
    assert runner.blocks.used > used
    after = runner.forward([Row.chain(seq_cache, [1])]).logits
    torch.testing.assert_close(before, after)


def test_out_of_blocks_is_clear_and_leaves_the_caches_as_they_were() -> None:
    runner = NativeRunner.of_model(tiny(), "tiny", kv_cache_tokens=128)
    seq_cache = runner.new_cache()
    runner.forward([Row.chain(seq_cache, [1] * 100)], last_only=True)
    with pytest.raises(OutOfMemory, match="--kv-cache-tokens"):
        runner.forward([Row.chain(seq_cache, [1] * 100)], last_only=True)
    assert seq_cache.length == 100
    runner.forward([Row.chain(seq_cache, [1] * 20)], last_only=True)
    runner.free(seq_cache)
    assert runner.blocks.free == runner.blocks.num_blocks


def test_a_cache_that_does_not_fit_names_the_option_and_a_smaller_one_works() -> None:
    with pytest.raises(OutOfMemory, match="--kv-cache-tokens"):
        NativeRunner.of_model(tiny(), "tiny", kv_cache_tokens=1 << 48)
    assert NativeRunner.of_model(tiny(), "tiny", kv_cache_tokens=128).free_tokens() == 128


def test_a_pass_that_does_not_fit_is_clear_and_the_next_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("the device is full")

    runner = NativeRunner.of_model(tiny(), "tiny", kv_cache_tokens=128)
    seq_cache = runner.new_cache()
    with monkeypatch.context() as broken, pytest.raises(OutOfMemory, match="fewer sequences"):
        broken.setattr(runner, "_dispatch", full)
        runner.forward([Row.chain(seq_cache, [1] * 20)], last_only=True)
    assert seq_cache.length == 0
    runner.forward([Row.chain(seq_cache, [1] * 20)], last_only=True)
    assert seq_cache.length == 20


def test_loads_a_directory_and_names_what_is_missing(tmp_path: Path) -> None:
    model = tiny("qwen2")
    model.save_pretrained(tmp_path)
    runner = NativeRunner.load(tmp_path, "tiny", "float32", "cpu", 512)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPTS[1]])).logits[0]
    output = runner.forward([Row.chain(runner.new_cache(), PROMPTS[1])])
    torch.testing.assert_close(output.logits, expected, rtol=1e-4, atol=1e-4)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    state.pop("model.layers.1.mlp.down_proj.weight")
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=r"model\.layers\.1\.mlp\.down_proj\.weight"):
        NativeRunner.load(tmp_path, "tiny", "float32", "cpu", 512)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        NativeRunner.load(tmp_path, "tiny", "float32", "cpu", 512)


def test_an_exit_reads_the_same_cache() -> None:
    model = tiny()
    runner = NativeRunner.of_model(model, "tiny", kv_cache_tokens=512)
    seq_cache = runner.new_cache()
    runner.forward([Row.chain(seq_cache, PROMPTS[0])], last_only=True)
    early = runner.early_exit(1).forward([Row.chain(seq_cache, [4])])
    with torch.no_grad():
        state = model(torch.tensor([[*PROMPTS[0], 4]]), output_hidden_states=True).hidden_states[1][0, -1:]
        expected = model.lm_head(model.model.norm(state))
    torch.testing.assert_close(early.logits, expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(OptionError):
        runner.early_exit(2)


def test_verification_resumes_from_the_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three draft tokens and none: of the first sequence the lower layer reads only the last one, and all is equal."""
    runner = NativeRunner.of_model(tiny(), "tiny", kv_cache_tokens=512)
    early, seq_caches, draft_tokens = runner.early_exit(1), [runner.new_cache(), runner.new_cache()], [[4, 9, 2], [6]]
    rows = [Row.chain(seq_cache, prompt) for seq_cache, prompt in zip(seq_caches, PROMPTS)]
    runner.forward(rows, last_only=True)
    lengths = [seq_cache.length for seq_cache in seq_caches]
    for token in draft_tokens[0]:
        early.forward([Row.chain(seq_caches[0], [token])])
        early.commit(seq_caches[0], [0])
    early.rollback_draft(seq_caches[0], lengths[0])
    read: list[int] = []
    project = runner.eager.ops.project
    monkeypatch.setattr(runner.eager.ops, "project", lambda x, *rest: read.append(x.shape[0]) or project(x, *rest))
    checked = [Row.chain(seq_caches[0], [*draft_tokens[0], 8]), Row.chain(seq_caches[1], draft_tokens[1])]
    resumed = runner.forward(checked)
    assert read == [1 + 1, 4 + 1]
    for seq_cache, length in zip(seq_caches, lengths):
        runner.truncate(seq_cache, length)
    again = runner.forward(checked)
    assert read[2:] == [5, 5]
    torch.testing.assert_close(resumed.logits, again.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spoiled", ["other draft tokens", "a truncation"])
def test_an_exit_that_is_out_of_date_is_not_resumed_from(spoiled: str) -> None:
    runner = NativeRunner.of_model(tiny(), "tiny", kv_cache_tokens=512)
    early, seq_cache = runner.early_exit(1), runner.new_cache()
    runner.forward([Row.chain(seq_cache, PROMPTS[0])], last_only=True)
    early.forward([Row.chain(seq_cache, [4])])
    early.rollback_draft(seq_cache, len(PROMPTS[0]))
    if spoiled == "a truncation":
        runner.truncate(seq_cache, len(PROMPTS[0]) - 1)
    tokens = [5, 9] if spoiled == "other draft tokens" else [PROMPTS[0][-1], 5, 9]
    output = runner.forward([Row.chain(seq_cache, tokens)])
    expected = runner.forward([Row.chain(runner.new_cache(), [*PROMPTS[0], 5, 9])])
    torch.testing.assert_close(output.logits[-2:], expected.logits[-2:], rtol=1e-5, atol=1e-5)


def test_registered_architectures_are_native() -> None:
    from transformers import GPT2Config, MistralConfig

    assert is_native(tiny("qwen3").config)
    assert is_native(MistralConfig(sliding_window=None))
    assert is_native(MistralConfig(sliding_window=4096))
    assert not is_native(GPT2Config())


def test_the_runner_uses_the_blocks_it_is_given() -> None:
    from paceline.kv.block_manager import BlockManager

    made = NativeRunner.of_model(tiny(), "tiny", kv_cache_tokens=64)
    blocks = BlockManager(3)
    runner = NativeRunner(made.model, made.info, blocks)
    assert runner.blocks is blocks and runner.free_tokens() == 3 * blocks.block_size
    runner.forward([Row.chain(runner.new_cache(), [1] * 65)], last_only=True)
    assert blocks.used == 2


def test_only_a_runner_with_graphs_is_batch_invariant_and_decodes_several_steps() -> None:
    runner = NativeRunner.of_model(tiny(), "tiny", kv_cache_tokens=64, batch_invariant=True)
    invariant = Capability.BATCH_INVARIANT in runner.capabilities
    assert invariant == (runner.decode_graphs is not None) == (runner.decode_steps > 1)
