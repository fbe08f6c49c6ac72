"""First reads of prompts, padded to fixed widths, against the plain pass. Without a pool nothing is captured."""

from __future__ import annotations

import pytest
import torch

from paceline.core import Row
from paceline.core.types import ModelOutput, SequenceCache
from paceline.runners.native import NativeRunner
from paceline.runners.native.prefill_graphs import WIDTHS, PrefillGraphs
from tests.runners.native.models import tiny

LENGTHS = (3, 32, 33, 150)


def runner_with(passes: bool) -> NativeRunner:
    runner = NativeRunner.of_model(tiny("llama"), "tiny", kv_cache_tokens=1024)
    runner.expose(hidden=True, features=(1,))
    runner.prompts = PrefillGraphs(runner, None) if passes else None
    return runner


def read(runner: NativeRunner, prompts: list[list[int]]) -> tuple[list[SequenceCache], ModelOutput]:
    seq_caches = [runner.new_cache() for _ in prompts]
    return seq_caches, runner.forward([Row.chain(seq_cache, prompt) for seq_cache, prompt in zip(seq_caches, prompts)], last_only=True)


def test_a_batch_of_first_reads_is_what_the_plain_pass_says() -> None:
    prompts = [torch.randint(0, 101, (length,)).tolist() for length in LENGTHS]
    plain, captured = runner_with(False), runner_with(True)
    (seq_caches, expected), (own_slots, output) = read(plain, prompts), read(captured, prompts)
    assert output.sizes == expected.sizes and output.read == expected.read == list(LENGTHS)
    pairs = ((output.logits, expected.logits), (output.hidden, expected.hidden), (output.features, expected.features))
    for ours, theirs in pairs:
        assert ours is not None and theirs is not None
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    after = plain.forward([Row.chain(seq_cache, [7, 8]) for seq_cache in seq_caches]).logits
    own = captured.forward([Row.chain(seq_cache, [7, 8]) for seq_cache in own_slots]).logits
    torch.testing.assert_close(own, after, rtol=1e-4, atol=1e-5)


def test_padding_touches_no_page_of_another_text() -> None:
    runner = runner_with(True)
    [first], _ = read(runner, [list(range(1, 60))])
    places = runner.blocks.table(first.seq_id)[0] * runner.blocks.size  # type: ignore[attr-defined]
    before = runner.keys[:, places : places + 59].clone()
    read(runner, [[5] * 70])
    assert torch.equal(before, runner.keys[:, places : places + 59])
    assert runner.keys[:, runner.scratch].abs().sum() > 0  # this is where it went


def test_what_goes_on_or_is_too_long_is_read_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, reads = runner_with(True), []
    assert runner.prompts is not None and not runner.prompts.fits(WIDTHS[-1] + 1)
    captured = runner.prompts.read

    def counted(tokens: torch.Tensor, places: torch.Tensor) -> ModelOutput:
        reads.append(tokens.shape[0])
        return captured(tokens, places)

    monkeypatch.setattr(runner.prompts, "read", counted)
    seq_cache = runner.new_cache()
    for tokens in ([1, 2, 3, 4], [5, 6, 7, 8]):
        runner.forward([Row.chain(seq_cache, tokens)], last_only=True)
    assert reads == [4] and seq_cache.length == 8


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_reads_are_repeatable_on_the_device() -> None:
    runner = NativeRunner.of_model(tiny("llama", torch.bfloat16).to("cuda"), "tiny", kv_cache_tokens=2048)
    prompt = torch.randint(0, 101, (100,)).tolist()
    first, again = (read(runner, [prompt])[1].logits.clone() for _ in range(2))
    runner.prompts = None
    assert torch.equal(first, again)
    torch.testing.assert_close(first.float(), read(runner, [prompt])[1].logits.float(), rtol=5e-2, atol=5e-2)
