"""A GGUF file gives the model it was made from, or an error that names what is not understood."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from paceline import SpeculativeDecoder, cli
from paceline.errors import WeightsError
from paceline.hub import locate
from paceline.hub.convert import unpacked_folder
from paceline.hub.gguf_rope import llama3_parameters
from tests.runners.native.models import tiny
from tests.support.gguf import gguf_name, llama3_rope_factors, write_gguf

VOCABULARY = 261
PROMPT = [5, 17, 200, 33, 2, 71, 8, 140] * 12  # past the lengths at which the scaled ropes differ
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "llama3": LLAMA3 | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "llama3 with other bounds": LLAMA3 | {"low_freq_factor": 0.3, "high_freq_factor": 5.5, "factor": 32.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
        "beta_fast": 16.0, "beta_slow": 2.0,
    },
}


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))


def model_of(kind: str = "llama", **changes: Any) -> Any:
    return tiny(kind, vocab_size=VOCABULARY, **changes)


def rope_metadata(rope: dict[str, Any]) -> Callable[[Any], None]:
    """The keys llama.cpp's conversion writes for a rope; Llama 3's is a tensor instead."""
    import gguf

    def write(writer: Any) -> None:
        if rope["rope_type"] not in ("linear", "yarn"):
            return
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if rope["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])

    return write


def tensors_of(model: Any) -> dict[str, np.ndarray]:
    is_llama3 = model.config.rope_parameters["rope_type"] == "llama3"
    return {"rope_freqs.weight": llama3_rope_factors(model.config)} if is_llama3 else {}


def converted_logits(path: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(unpacked_folder(locate(str(path)).folder), dtype=torch.float32)
    return logits_of(model)


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([PROMPT])).logits
    return logits


@torch.no_grad()
def greedy(model: Any, count: int) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.mark.slow
@pytest.mark.parametrize("name", ROPES)
def test_every_rope_gives_the_logits_of_the_model_the_file_was_made_from(tmp_path: Path, name: str) -> None:
    model = model_of(rope_parameters=ROPES[name])
    path = write_gguf(tmp_path / "tiny.gguf", model, metadata=rope_metadata(ROPES[name]), added=tensors_of(model))
    torch.testing.assert_close(converted_logits(path), logits_of(model), rtol=1e-5, atol=1e-5)
    if name != "default":
        plain = logits_of(model_of(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}))
        assert (logits_of(model) - plain).abs().max() > 1e-2, "this rope would not be missed"


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["native", "hf"])
@pytest.mark.parametrize("name", ["llama3", "yarn"])
def test_generated_tokens_are_those_of_the_original(tmp_path: Path, name: str, runner: str) -> None:
    model = model_of(rope_parameters=ROPES[name])
    path = write_gguf(tmp_path / "tiny.gguf", model, metadata=rope_metadata(ROPES[name]), added=tensors_of(model))
    with SpeculativeDecoder(str(path), method="ngram", runner=runner, dtype="float32", device="cpu") as decoder:
        output = decoder.generate(PROMPT, max_new_tokens=12, ignore_eos=True)
    assert output.token_ids == greedy(model, 12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_every_architecture_gives_the_logits_of_its_original(tmp_path: Path, kind: str) -> None:
    model = model_of(kind, tie_word_embeddings=kind == "qwen3")
    path = write_gguf(tmp_path / "tiny.gguf", model)
    torch.testing.assert_close(converted_logits(path), logits_of(model), rtol=0, atol=0)


@pytest.mark.slow
def test_biases_of_a_llama_are_kept(tmp_path: Path) -> None:
    model = model_of(attention_bias=True)
    path = write_gguf(tmp_path / "tiny.gguf", model)
    torch.testing.assert_close(converted_logits(path), logits_of(model), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["Q8_0", "Q4_0", "Q5_1", "F16", "BF16"])
def test_weights_are_those_of_the_gguf_package(tmp_path: Path, quantization: str) -> None:
    from gguf import GGMLQuantizationType, GGUFReader, dequantize

    model = model_of("qwen2", hidden_size=64, intermediate_size=96)
    path = write_gguf(tmp_path / "tiny.gguf", model, quantization=GGMLQuantizationType[quantization])
    reference = {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in GGUFReader(path).tensors}
    converted = load_file(unpacked_folder(locate(str(path)).folder) / "model.safetensors")
    assert {gguf_name(name, "qwen2") for name in converted} == set(reference)
    for name, weight in converted.items():
        expected = torch.from_numpy(reference[gguf_name(name, "qwen2")].copy())
        assert torch.equal(weight, expected.to(weight.dtype))
        if quantization in ("F16", "BF16") or weight.dim() == 1:
            assert torch.equal(weight.float(), expected), "what is not quantized loses nothing"


def test_the_settings_of_the_real_llama3_models_are_found_again() -> None:
    from transformers import LlamaConfig

    for factor, head_dim in ((8.0, 128), (32.0, 64), (32.0, 128)):
        rope = {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        }
        config = LlamaConfig(head_dim=head_dim, rope_parameters=rope)
        found = llama3_parameters(llama3_rope_factors(config).astype(np.float64), head_dim, 500000.0)
        assert found | {"rope_theta": 500000.0} == rope


def refused(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command line says to a file that must not run: one line."""
    assert cli.main(["generate", "-m", str(path), "--max-new-tokens", "4", "hello"]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line != "paceline: converting"]
    assert len(lines) == 1 and lines[0].startswith("paceline: error: ")
    assert not [folder for folder in (path.parent / "cache").iterdir() if folder.is_dir()], "nothing was kept"
    return lines[0]


KEYS: dict[str, tuple[Callable[[Any], None], str]] = {
    "rope type": (lambda writer: writer.add_string("llama.rope.scaling.type", "longrope"), "rope.scaling.type"),
    "unknown": (lambda writer: writer.add_float32("llama.some.new_thing", 2.0), "llama.some.new_thing"),
    "scale": (lambda writer: writer.add_float32("llama.logit_scale", 0.5), "llama.logit_scale"),
    "softcap": (lambda writer: writer.add_attn_logit_softcapping(50.0), "attn_logit_softcapping"),
    "window": (lambda writer: writer.add_sliding_window(16), "sliding_window"),
    "kinds of layer": (lambda writer: writer.add_array("llama.layer_kinds", [1, 2]), "layer_kinds"),
    "tokenizer": (lambda writer: writer.add_bool("tokenizer.ggml.new_rule", True), "tokenizer.ggml.new_rule"),
    "part": (lambda writer: writer.add_uint16("split.count", 3), "one of 3 parts"),
    "adapter": (lambda writer: writer.add_string("general.type", "adapter"), "general.type = adapter"),
}


@pytest.mark.parametrize("case", KEYS)
def test_a_key_that_is_not_understood_is_named(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, name = KEYS[case]
    assert name in refused(write_gguf(tmp_path / "tiny.gguf", model_of(), metadata=change), capsys)


@pytest.mark.slow
def test_keys_that_change_nothing_are_taken(tmp_path: Path) -> None:
    def write(writer: Any) -> None:
        writer.add_string("general.license", "apache-2.0")
        writer.add_uint32("llama.expert_count", 0)
        writer.add_string("quantize.imatrix.file", "x")
        writer.add_rope_scaling_type(__import__("gguf").RopeScalingType.NONE)
        writer.add_sliding_window(1 << 20)

    model = model_of()
    torch.testing.assert_close(
        converted_logits(write_gguf(tmp_path / "tiny.gguf", model, metadata=write)), logits_of(model), rtol=0, atol=0
    )


TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "long factors": ({"added": {"rope_factors_long.weight": np.ones(16, np.float32)}}, "rope_factors_long.weight"),
    "bias": ({"added": {"blk.0.ffn_up.bias": np.ones(80, np.float32)}}, "blk.0.ffn_up.bias"),
    "one bias": ({"added": {"blk.0.attn_q.bias": np.ones(192, np.float32)}}, "blk.0.attn_q.bias"),
    "layer": ({"added": {"blk.2.attn_norm.weight": np.ones(48, np.float32)}}, "says 2 layers"),
    "missing": ({"without": ("blk.1.ffn_down.weight",)}, "blk.1.ffn_down.weight"),
    "not a number": ({"added": {"output_norm.weight": np.full(48, np.nan, np.float32)}}, "output_norm.weight"),
    "odd rope": ({"added": {"rope_freqs.weight": np.arange(1, 17, dtype=np.float32)}}, "rope_freqs.weight"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", TENSORS)
def test_a_tensor_that_does_not_belong_is_named(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, name = TENSORS[case]
    assert name in refused(write_gguf(tmp_path / "tiny.gguf", model_of(), **options), capsys)


def test_a_file_cut_short_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", model_of())
    path.write_bytes(path.read_bytes()[:-5000])
    assert "is it complete?" in refused(path, capsys)


def stablelm_of(theta: float) -> Any:
    """Of an architecture that goes through transformers, which takes 10000 for the base of its rope."""
    rope = {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.25}
    return model_of("stablelm", rope_parameters=rope).to(torch.bfloat16).float()


def test_a_key_of_another_architecture_is_named_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(writer: Any) -> None:
        writer.add_string("stablelm.some.new_thing", "x")

    path = write_gguf(tmp_path / "tiny.gguf", stablelm_of(10000.0), metadata=write)
    assert "stablelm.some.new_thing" in refused(path, capsys)


@pytest.mark.parametrize(("theta", "understood"), [(10000.0, True), (40000.0, False)])
def test_what_transformers_converts_is_what_the_file_says(tmp_path: Path, theta: float, understood: bool) -> None:
    pytest.importorskip("accelerate")
    model = stablelm_of(theta)
    path = write_gguf(tmp_path / "tiny.gguf", model)
    if understood:
        torch.testing.assert_close(converted_logits(path), logits_of(model), rtol=1e-3, atol=1e-3)
        return
    with pytest.raises(WeightsError, match=r"stablelm\.rope\.freq_base = 40000"):
        locate(str(path))


# --- tokenizers -------------------------------------------------------------------------------------------------------


def tokenizer_of(path: Path) -> Any:
    from paceline.hub.tokenizer import load_tokenizer

    return load_tokenizer(locate(str(path)).folder, "tiny")


@pytest.mark.parametrize(("pre_tokenizer", "bos"), [("gpt-2", False), ("llama-bpe", True), ("qwen2", False)])
def test_a_prompt_begins_as_llama_cpp_begins_it(tmp_path: Path, pre_tokenizer: str, bos: bool) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", model_of(), pre_tokenizer=pre_tokenizer)
    ids = tokenizer_of(path)("he").input_ids
    assert ids == [257, 256] if bos else [256]


def test_the_file_may_say_that_a_prompt_begins_with_bos(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", model_of(), metadata=lambda writer: writer.add_add_bos_token(True))
    assert tokenizer_of(path)("he").input_ids == [257, 256]


def sentencepiece(writer: Any) -> None:
    """A vocabulary of the older kind: pieces with scores, a space as ▁."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "h", "e", "he", "▁he"]
    rest = [f"<0x{index:02X}>" for index in range(VOCABULARY - len(pieces))]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(pieces + rest)
    writer.add_token_scores([-float(index) for index in range(VOCABULARY)])
    writer.add_token_types([2, 3, 3, *([1] * (len(pieces) - 3)), *([6] * len(rest))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


@pytest.mark.parametrize(("space", "ids"), [(True, [1, 7]), (False, [1, 6])])
def test_a_sentencepiece_prompt_begins_with_bos_and_a_space_unless_the_file_says_not(
    tmp_path: Path, space: bool, ids: list[int]
) -> None:
    def metadata(writer: Any) -> None:
        writer.add_add_space_prefix(space)

    tokenizer = tokenizer_of(
        write_gguf(tmp_path / "tiny.gguf", model_of(), tokenizer=sentencepiece, metadata=metadata)
    )
    assert tokenizer("he").input_ids == ids and tokenizer.decode(ids, skip_special_tokens=True) == "he"


def test_no_token_is_without_an_embedding(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(write_gguf(tmp_path / "tiny.gguf", model_of()))
    assert len(tokenizer) == VOCABULARY and max(tokenizer("<|endoftext|>").input_ids) < VOCABULARY


def test_a_way_of_splitting_that_is_not_known_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", model_of(), pre_tokenizer="some-new-split")
    assert "tokenizer.ggml.pre = some-new-split" in refused(path, capsys)


@pytest.mark.slow
def test_every_end_token_ends_a_sequence(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", model_of(), metadata=lambda writer: writer.add_eot_token_id(259))
    with SpeculativeDecoder(str(path), device="cpu") as decoder:
        assert decoder.info.eos_token_ids == {258, 259}


@pytest.mark.slow
def test_a_changed_converter_does_not_use_old_conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.hub import convert

    path = write_gguf(tmp_path / "tiny.gguf", model_of())
    first = locate(str(path)).folder
    monkeypatch.setattr(convert, "CONVERTER", convert.CONVERTER + 1)
    assert locate(str(path)).folder != first


def test_a_rope_scaled_twice_is_refused(tmp_path: Path) -> None:
    model = model_of(rope_parameters=ROPES["llama3"])
    path = write_gguf(
        tmp_path / "tiny.gguf", model, metadata=rope_metadata(ROPES["linear"]), added=tensors_of(model)
    )
    with pytest.raises(WeightsError, match="twice"):
        locate(str(path))
