"""`--kv-cache-dtype lossy-fp8`: half of the bytes, drafts exact over the rounded cache, and named lossy everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import SpeculativeDecoder, cli
from paceline.core.types import Row
from paceline.errors import OptionError
from paceline.runners.native import NativeRunner
from tests.runners.native.models import tiny
from tests.support.tiny import write_tiny_model

LOSSY = "lossy-fp8"
PROMPT = [5, 17, 20, 33, 2, 71, 8, 14] * 6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def runner_of(kind: str = "llama", *, rounded: bool = True, **changes: Any) -> NativeRunner:
    return NativeRunner.of_model(tiny(kind, **changes).to(DEVICE), "tiny", 512, rounded_kv=rounded)


def logits_by_steps(runner: NativeRunner) -> torch.Tensor:
    seq_cache = runner.new_cache()
    return torch.cat([runner.forward([Row.chain(seq_cache, [token])]).logits for token in PROMPT])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_a_rounded_cache_is_near_the_exact_one_and_is_used(kind: str) -> None:
    rounded, exact = (runner_of(kind, rounded=flag) for flag in (True, False))
    assert rounded.kv.keys.itemsize == 1 and exact.kv.keys.itemsize >= 2
    whole = rounded.forward([Row.chain(rounded.new_cache(), PROMPT)]).logits
    reference = exact.forward([Row.chain(exact.new_cache(), PROMPT)]).logits
    error = (whole - reference).norm() / reference.norm()
    assert 1e-5 < error < 0.3, "rounded, and no more than that"
    torch.testing.assert_close(logits_by_steps(rounded), whole, rtol=1e-2, atol=1e-2)


def test_batches_read_the_rounded_cache_too() -> None:
    runner = runner_of()
    caches = [runner.new_cache() for _ in range(3)]
    runner.forward([Row.chain(cache, PROMPT[:20]) for cache in caches])
    batch = runner.forward([Row.chain(cache, [7]) for cache in caches]).logits
    torch.testing.assert_close(batch, batch[:1].expand(3, -1), rtol=1e-3, atol=1e-3)
    alone = runner.new_cache()
    runner.forward([Row.chain(alone, PROMPT[:20])])
    torch.testing.assert_close(runner.forward([Row.chain(alone, [7])]).logits, batch[:1], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_fused_kernels_read_and_write_the_same_bytes(kind: str) -> None:
    pytest.importorskip("triton")
    from tests.runners.native.fused import eager_graphs

    runner = runner_of(kind, hidden_size=96, intermediate_size=96, num_hidden_layers=1)
    eager, fused = runner.new_cache(), runner.new_cache()
    runner.forward([Row.chain(eager, PROMPT[:12])])
    runner.forward([Row.chain(fused, PROMPT[:12])])
    expected = runner.forward([Row.chain(eager, PROMPT[12:16])]).logits.clone()
    runner.decode_graphs = eager_graphs(runner)
    logits = runner.forward([Row.chain(fused, PROMPT[12:16])]).logits
    torch.testing.assert_close(logits, expected, rtol=1e-2, atol=1e-2)
    slots = [[runner.kv.full.slot(cache, token) for token in range(16)] for cache in (eager, fused)]
    first, second = (runner.kv.keys[:, places] for places in slots)
    assert (first != second).float().mean() < 0.01, "but for a last bit that a rounding turns on"


@pytest.mark.slow
def test_drafts_give_the_text_of_plain_decoding(tmp_path: Path) -> None:
    """int8 weights compute a token alike at every width, so a rounding never depends on who drafted."""
    folder = write_tiny_model(tmp_path)
    texts = []
    for method in ({}, {"method": "ngram", "num_draft_tokens": 4}, {"draft_model": folder, "num_draft_tokens": 3}):
        with SpeculativeDecoder(folder, device="cpu", kv_cache_dtype=LOSSY, quantize="int8", **method) as decoder:
            texts.append(decoder.generate("to be or not to be", max_new_tokens=40, ignore_eos=True).token_ids)
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.slow
def test_the_command_line_takes_it_and_the_audit_says_that_it_is_not_lossless(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--kv-cache-dtype", LOSSY, "--device", "cpu"]
    assert cli.main(["generate", "hello", "-m", str(tiny_folder), "--max-new-tokens", "4", "--json", *flags]) == 0
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["token_ids"]) == 4
    audit = ["audit", str(tiny_folder), "--methods", "ngram", "--acceptance", "token", "--quick", "--json", *flags]
    assert cli.main([*audit, "--draws", "200", "--seconds", "5"]) == 1
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["outcome"] == "different" and f"KV cache in {LOSSY}" in document["different"]


@pytest.mark.slow
def test_the_plan_counts_half_of_the_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = []
    for dtype in ("auto", LOSSY):
        assert cli.main(["plan", "llama-3.1-8b", "--max-seq-len", "8192", "--kv-cache-dtype", dtype, "--json"]) == 0
        document = json.loads(capsys.readouterr().out.splitlines()[-1])
        sizes.append(next(part["bytes"] for part in document["parts"] if part["name"] == "target KV cache"))
    assert sizes[1] * 2 == sizes[0]


@pytest.mark.slow
def test_what_cannot_round_says_so(tiny_folder: Path) -> None:
    with pytest.raises(OptionError, match="needs a model that paceline runs itself"):
        SpeculativeDecoder(tiny_folder, runner="hf", kv_cache_dtype=LOSSY)
    with pytest.raises(OptionError, match="kv_cache_dtype must be one of auto, lossy-fp8"):
        SpeculativeDecoder(tiny_folder, kv_cache_dtype="fp8")
    with pytest.raises(OptionError, match="the engine llama_cpp takes no kv_cache_dtype"):
        SpeculativeDecoder("default", engine="llama_cpp", kv_cache_dtype=LOSSY)


@pytest.mark.gpu
def test_on_a_gpu_drafted_text_is_plain_text_bit_for_bit(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, hidden_size=256, intermediate_size=512, num_attention_heads=4)
    texts = []
    for method in ({}, {"method": "ngram", "num_draft_tokens": 7}, {"draft_model": folder, "num_draft_tokens": 5}):
        with SpeculativeDecoder(folder, device="cuda", kv_cache_dtype=LOSSY, **method) as decoder:
            texts.append(decoder.generate("to be or not to be", max_new_tokens=200, ignore_eos=True).token_ids)
    assert texts[0] == texts[1] == texts[2]
