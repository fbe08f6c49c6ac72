"""The Hugging Face runners beyond the contract: what the probe finds, how they load, what a pass costs."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from paceline import SpeculativeDecoder
from paceline.core.types import Capability, Row
from paceline.errors import CapabilityError, OptionError, OutOfMemory, WeightsError
from paceline.runners import huggingface_cache, huggingface_state
from paceline.runners.huggingface import HuggingFaceRunner
from paceline.runners.huggingface_cache import FIRST_CAPACITY
from paceline.runners.huggingface_probe import open_hugging_face, random_ids
from paceline.runners.loading import DTYPES, dtype_named, load_model
from tests.support.families import Variant, prompts_of, tiny_family
from tests.support.tiny import byte_tokenizer, tiny_llama, write_tiny_model


def text_of(model: Any, method: str, prompt: list[int], num_tokens: int = 24, **options: Any) -> list[int]:
    """What a user gets from a loaded model."""
    options = {"num_draft_tokens": 4, "tokenizer": byte_tokenizer(), **options}
    with SpeculativeDecoder(model, method=method, **options) as decoder:
        return decoder.generate(prompt, max_new_tokens=num_tokens, ignore_eos=True).token_ids


def test_full_attention_keeps_batches_and_trees() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64))
    runner = open_hugging_face(model, "gpt2")
    assert Capability.TREE in runner.capabilities and runner.plain_only is None


def test_a_model_that_is_used_again_is_not_probed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_family(Variant("bloom"))
    first = open_hugging_face(model, "bloom")
    monkeypatch.setattr("paceline.runners.huggingface_probe.Probe", None)
    assert type(open_hugging_face(model, "bloom")) is type(first)


def test_the_probe_leaves_blocks_and_windows_as_they_were() -> None:
    model = tiny_family(Variant("mistral", changes={"sliding_window": 100}))
    runner = open_hugging_face(model, "mistral")
    assert runner.blocks.used == 0 and model.config.sliding_window == 100
    assert isinstance(runner, HuggingFaceRunner) and [kind.reach for kind in runner.kinds] == [100]


@pytest.mark.parametrize("kind", ["gpt_neo", "bart", "marian", "mpt"])
def test_what_a_model_reads_wrongly_as_a_tree_is_no_capability(kind: str) -> None:
    runner = open_hugging_face(tiny_family(Variant(kind)), kind)
    assert Capability.TREE not in runner.capabilities and runner.plain_only is None


@pytest.mark.parametrize("kind", ["gpt_neo", "bart", "marian"])
def test_a_model_that_computes_its_own_positions_is_right_in_a_batch(kind: str) -> None:
    model = tiny_family(Variant(kind))
    runner = open_hugging_face(model, kind)
    ids = [(5 + 3 * place) % 40 for place in range(24)]
    long, short = runner.new_cache(), runner.new_cache()
    runner.forward([Row.chain(long, ids[:22]), Row.chain(short, ids[:1])], last_only=True)
    output = runner.forward([Row.chain(long, ids[22:]), Row.chain(short, ids[1:])])
    with torch.no_grad():
        expected = model(torch.tensor([ids]), use_cache=False).logits[0]
    torch.testing.assert_close(output[0].logits, expected[22:], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(output[1].logits, expected[1:], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["suffix", "lookahead"])
def test_methods_that_draft_trees_draft_chains_where_trees_are_read_wrongly(method: str) -> None:
    """MPT counts its alibi from the end of the row: a tree is another model there, a chain is not."""
    model = tiny_family(Variant("mpt"))
    for seed in range(6):
        prompt = [*prompts_of(seed)[0], *prompts_of(seed)[0]]
        assert text_of(model, method, prompt, 40) == text_of(model, "none", prompt, 40)


class SharedScaleLinear(torch.nn.Linear):
    """Rounds its inputs with one scale for the whole pass, as some 8-bit layers do: rows change each other."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        scale = states.abs().max() / 127
        return super().forward((states / scale).round() * scale)


def quantized_llama() -> Any:
    model = tiny_llama()
    for layer in model.model.layers:
        plain = layer.mlp.down_proj
        layer.mlp.down_proj = SharedScaleLinear(plain.in_features, plain.out_features, bias=False)
        layer.mlp.down_proj.weight = plain.weight
    return model


@pytest.mark.slow
def test_where_rows_of_a_pass_change_each_other_decoding_is_plain_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, prompt = quantized_llama(), [5, 6, 7, 5, 6, 7, 5, 6]
    drafted = text_of(model, "ngram", prompt)
    assert [record.message for record in caplog.records if "decoded plainly" in record.message]
    assert drafted == text_of(model, "none", prompt)
    with SpeculativeDecoder(model, method="ngram", num_draft_tokens=4, tokenizer=byte_tokenizer()) as decoder:
        result = decoder.generate(prompt, max_new_tokens=12, ignore_eos=True)
        batch = decoder.generate([prompt, prompt[:3], prompt[:5]], max_new_tokens=12, ignore_eos=True)
    assert result.stats.drafted == 0
    assert batch[0].token_ids == result.token_ids, "a sequence does not depend on its neighbours"


@pytest.mark.slow
def test_8_bit_layers_of_bitsandbytes_are_known_without_a_probe() -> None:
    """Outliers decide there how a pass is computed, and random tokens may have none."""
    model = tiny_llama()
    model.is_loaded_in_8bit = True
    assert "8-bit" in str(open_hugging_face(model, "llama").plain_only)


def longrope(**changes: Any) -> Any:
    """Phi-3 with other rope factors past 24 tokens."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0, 3.0, 2.0, 1.5]}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 24, **factors}
    sizes = {"rope_parameters": rope, "original_max_position_embeddings": 24, "sliding_window": None}
    return tiny_family(Variant("phi3", changes={**sizes, **changes}))


@pytest.mark.slow
@pytest.mark.parametrize("length", [15, 23, 24, 30])
def test_speculation_crosses_the_switch_of_rope_factors_as_transformers_does(length: int) -> None:
    model, prompt = longrope(), [(7 * place) % 11 for place in range(length)]
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    for method, draft in (("none", None), ("ngram", None), ("draft_model", model)):
        assert text_of(model, method, prompt, draft_model=draft) == expected[0, length:].tolist(), method


@pytest.mark.slow
def test_the_switch_of_rope_factors_does_not_reach_the_neighbours() -> None:
    model, prompts = longrope(), [list(range(length)) for length in (5, 28, 20)]
    with SpeculativeDecoder(model, method="ngram", num_draft_tokens=4, tokenizer=byte_tokenizer()) as decoder:
        alone = [decoder.generate(prompt, max_new_tokens=16, ignore_eos=True).token_ids for prompt in prompts]
        together = decoder.generate(prompts, max_new_tokens=16, ignore_eos=True)
    assert [result.token_ids for result in together] == alone


def test_a_model_that_is_not_causal_is_refused_in_one_line() -> None:
    with pytest.raises(CapabilityError, match="depends on the tokens after it") as refusal:
        open_hugging_face(tiny_family(Variant("bert", changes={"is_decoder": False})), "bert")
    assert "\n" not in str(refusal.value)


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


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2"])
def test_the_rounding_of_half_precision_is_no_reason_to_refuse(kind: str) -> None:
    """In bfloat16 a pass of one token and a wide one differ by a few percent; wrong positions differ by more."""
    runner = open_hugging_face(tiny_family(Variant(kind)).bfloat16(), kind)
    assert Capability.TREE in runner.capabilities and runner.plain_only is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt_neo", "mpt"])
def test_wrong_trees_are_found_in_half_precision_too(kind: str) -> None:
    runner = open_hugging_face(tiny_family(Variant(kind)).bfloat16(), kind)
    assert Capability.TREE not in runner.capabilities


@pytest.mark.slow
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


def test_a_config_may_name_several_end_tokens() -> None:
    """As that of a GGUF file, and so the default model's, whose turns end with another token than its texts."""
    model = tiny_llama()
    model.config.eos_token_id, model.config.bos_token_id = [2, 5], 1
    ids = random_ids(model, 40)
    assert len(ids) == 40 and not {1, 2, 5} & set(ids)


class NoMemory:
    """Stands in for a function that allocates, and fails at one of its next calls."""

    def __init__(self, function: Any, fails_at: int) -> None:
        self._function, self._calls_left = function, fails_at

    def __call__(self, *arguments: Any) -> Any:
        self._calls_left -= 1
        if not self._calls_left:
            raise torch.OutOfMemoryError("made up")
        return self._function(*arguments)


@pytest.mark.parametrize("fails_at", [1, 2, 3])
def test_buffers_that_found_no_memory_to_grow_are_as_good_as_before(
    fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of keys and values of three layers the first one, the second or the third was not allocated."""
    model, ids = tiny_llama(), [7 * place % 250 for place in range(FIRST_CAPACITY + 60)]
    runner = HuggingFaceRunner(model, "tiny")
    cache = runner.new_cache()
    runner.forward([Row.chain(cache, ids[:20])])
    with monkeypatch.context() as patch, pytest.raises(OutOfMemory):
        patch.setattr(huggingface_cache, "_enlarged", NoMemory(huggingface_cache._enlarged, fails_at))
        runner.forward([Row.chain(cache, ids[20:])])
    others = [runner.new_cache() for _ in range(2)]
    runner.forward([Row.chain(other, ids[:9]) for other in others])  # more rows, and of the columns no more
    logits = runner.forward([Row.chain(cache, ids[20:])]).logits
    with torch.inference_mode():
        assert torch.allclose(logits, model(torch.tensor([ids])).logits[0, 20:], atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_a_prefix_that_cannot_be_copied_costs_the_prefix_and_not_the_engine(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama() if kind == "llama" else tiny_family(Variant(kind))
    shared = [7 * place % 250 for place in range(150)]
    prompts = [[*shared, last] for last in (1, 2, 3)]
    expected = [text_of(model, "none", prompt) for prompt in prompts]
    with SpeculativeDecoder(model, method="none", tokenizer=byte_tokenizer()) as decoder:
        decoder.generate([*shared, *range(70)], max_new_tokens=9)
        monkeypatch.setattr(huggingface_cache, "_enlarged", NoMemory(huggingface_cache._enlarged, 1))
        monkeypatch.setattr(huggingface_state, "_twin", NoMemory(huggingface_state._twin, 1))
        results = decoder.generate(prompts, max_new_tokens=24, ignore_eos=True)
    assert [result.token_ids for result in results] == expected
