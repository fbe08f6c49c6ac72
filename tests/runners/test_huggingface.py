"""The Hugging Face runner beyond the contract: what it refuses, how it batches, what it loads, what a pass costs."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MambaConfig,
    MarianConfig,
    MarianForCausalLM,
    MistralConfig,
    Qwen2Config,
    RwkvConfig,
    RwkvForCausalLM,
)

from paceline.core.types import Capability, Row
from paceline.errors import CapabilityError, OptionError, WeightsError
from paceline.runners.huggingface import HuggingFaceRunner, refuse_what_cannot_roll_back
from paceline.runners.loading import DTYPES, dtype_named, load_model
from tests.support.tiny import write_tiny_model


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MistralConfig(sliding_window=128), "sliding_attention"),
        (Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=0), "sliding_attention"),
        (MambaConfig(), "linear_attention"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_a_cache_that_cannot_be_cut_back_is_refused_with_the_reason(config: Any, reason: str) -> None:
    with pytest.raises(CapabilityError, match=reason):
        refuse_what_cannot_roll_back(config, "that model")


def test_a_recurrent_model_is_refused() -> None:
    sizes = {"hidden_size": 16, "attention_hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    with pytest.raises(CapabilityError, match="recurrent"):
        HuggingFaceRunner(RwkvForCausalLM(RwkvConfig(vocab_size=20, **sizes)), "rwkv")


@pytest.mark.parametrize("config", [MistralConfig(sliding_window=None), Qwen2Config(use_sliding_window=False)])
def test_full_attention_is_not_refused(config: Any) -> None:
    refuse_what_cannot_roll_back(config, "that model")


def test_a_model_with_a_sliding_window_is_refused_when_it_is_built() -> None:
    from transformers import MistralForCausalLM

    from paceline import SpeculativeDecoder

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = MistralForCausalLM(MistralConfig(vocab_size=20, num_key_value_heads=2, sliding_window=4, **sizes))
    with pytest.raises(CapabilityError, match="full attention"):
        SpeculativeDecoder(model, method="ngram", num_draft_tokens=2)


DECODER = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 32}
ENCODER = {"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 32, "max_position_embeddings": 128}


def _gpt_neo() -> Any:
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 128}
    return GPTNeoForCausalLM(GPTNeoConfig(attention_types=[[["global", "local"], 1]], window_size=8, **sizes))


OWN_POSITIONS = {
    "gpt_neo": _gpt_neo,
    "bart": lambda: BartForCausalLM(BartConfig(vocab_size=40, **DECODER, **ENCODER)),
    "marian": lambda: MarianForCausalLM(MarianConfig(vocab_size=40, pad_token_id=0, **DECODER, **ENCODER)),
}


@pytest.mark.parametrize("kind", OWN_POSITIONS)
def test_a_model_that_computes_its_own_positions_is_right_in_a_batch(kind: str) -> None:
    torch.manual_seed(0)
    model = OWN_POSITIONS[kind]().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.2)
    runner = HuggingFaceRunner(model, kind)
    assert Capability.TREE not in runner.capabilities and runner.blocks.used == 0
    ids = [(5 + 3 * place) % 40 for place in range(14)]
    long, short = runner.new_cache(), runner.new_cache()
    runner.forward([Row.chain(long, ids[:12]), Row.chain(short, ids[:1])], last_only=True)
    output = runner.forward([Row.chain(long, ids[12:]), Row.chain(short, ids[1:])])
    with torch.no_grad():
        expected = model(torch.tensor([ids]), use_cache=False).logits[0]
    torch.testing.assert_close(output[0].logits, expected[12:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(output[1].logits, expected[1:], rtol=1e-4, atol=1e-4)


def test_a_model_that_uses_the_positions_it_is_given_keeps_batches_and_trees() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    runner = HuggingFaceRunner(model, "gpt2")
    assert Capability.TREE in runner.capabilities and runner._batches


def test_dtypes_by_name() -> None:
    assert DTYPES[dtype_named(None, "cpu")] == torch.float32
    assert DTYPES[dtype_named("bf16", "cpu")] == torch.bfloat16
    with pytest.raises(OptionError, match="fp32"):
        dtype_named("int3", "cpu")


def test_truncated_weights(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(WeightsError, match="damaged, incomplete"):
        load_model(folder, "cut", torch.float32, "cpu")


class Evil:
    """Opened as a pickle it would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("evil-was-here"),))


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_tiny_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="Convert them to safetensors"):
        load_model(folder, "pickled", torch.float32, "cpu")
    assert not (tmp_path / "evil-was-here").exists()


def test_a_harmless_pickle_is_loaded(tmp_path: Path, tiny_model: Any) -> None:
    folder = write_tiny_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    torch.save(tiny_model.state_dict(), folder / "pytorch_model.bin")
    loaded = load_model(folder, "pickled", torch.float32, "cpu")
    assert torch.equal(loaded.lm_head.weight, tiny_model.lm_head.weight)


def test_a_pass_does_not_grow_with_the_sequence_beyond_attention(default_model: Any) -> None:
    """Nothing is read again: a pass after 1,000 tokens takes less than twice one after 100."""
    runner = HuggingFaceRunner(default_model, "default")
    seq_caches = {length: runner.new_cache() for length in (100, 1000)}
    taken: dict[int, list[float]] = {length: [] for length in seq_caches}
    for length, seq_cache in seq_caches.items():
        runner.forward([Row.chain(seq_cache, [(7 * n) % 1000 for n in range(length)])], last_only=True)
    for _ in range(5):  # interleaved, so that a busy machine slows both alike
        for length, seq_cache in seq_caches.items():
            started = time.perf_counter()
            runner.forward([Row.chain(seq_cache, [11])])
            taken[length].append(time.perf_counter() - started)
            runner.truncate(seq_cache, length)
    assert median(taken[1000]) < 2 * median(taken[100])
