"""Plans of every kind of layer: the bytes of tiny checkpoints, and of the caches that transformers makes for them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.plan.locate import find_sizes
from paceline.plan.memory import Deployment, kv_bytes, state_bytes
from paceline.plan.methods import draft_method
from paceline.plan.model_sizes import ModelSizes, sizes_from_config
from paceline.plan.precision import find_precision, weight_bytes
from tests.support.families import VARIATIONS, Variant, tiny_family

FP32 = find_precision("fp32")
FEW = ("gemma3_text", "gpt_oss", "qwen3_next", "deepseek_v3", "lfm2")  # of the fast lane
DENSE = (
    "llama", "mistral", "ministral", "ministral3", "phi3", "granite", "smollm3", "qwen2", "qwen3", "gemma", "gemma2",
    "gpt2", "gpt_neox", "phi", "starcoder2", "olmo", "olmo2", "olmo3", "exaone4", "hunyuan_v1_dense", "cohere",
    "cohere2", "glm", "glm4", "arcee", "seed_oss", "ernie4_5",
)  # fmt: skip
EXPERTS = (
    "mixtral", "phimoe", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "granitemoeshared", "glm4_moe",
    "glm4_moe_lite", "dots1", "deepseek_v2",
)  # fmt: skip
RECURRENT = (
    "qwen3_5_text", "qwen3_5_moe_text", "lfm2_moe", "mamba", "mamba2", "falcon_mamba", "bamba", "falcon_h1",
    "nemotron_h", "granitemoehybrid", "jamba",
)  # fmt: skip
NAMED = ("qwen3_next-four_layers", "lfm2-conv_last", "deepseek_v3-no_q_lora", "gemma3_text-window_5", "qwen2-window")
VARIANTS = [*(Variant(kind) for kind in (*DENSE, *EXPERTS, *RECURRENT)), *(v for v in VARIATIONS if v.id in NAMED)]


def from_config_alone(model: Any, folder: Path) -> ModelSizes:
    """Sizes by the config, without the weights beside it."""
    model.save_pretrained(folder / "whole")
    alone = folder / "alone"
    alone.mkdir()
    shutil.copy(folder / "whole" / "config.json", alone)
    return find_sizes(str(alone))


def check_weights(variant: Variant, folder: Path, notes: int = 0) -> None:
    model = tiny_family(variant)
    sizes = from_config_alone(model, folder)
    assert len(sizes.notes) == notes, sizes.notes
    assert weight_bytes(sizes, FP32) == find_sizes(str(folder / "whole")).stored_bytes


def check_cache(variant: Variant) -> None:
    """Twenty tokens, with windows of 16 and less. transformers keeps of a window one token less than it looks at."""
    model, num_tokens = tiny_family(variant), 20
    with torch.inference_mode():
        output = model(torch.arange(num_tokens)[None], use_cache=True)
    cache = output["cache_params" if "cache_params" in output else "past_key_values"]
    sizes = sizes_from_config(model.config.to_dict(), variant.id)
    deployment = Deployment(sizes, FP32, draft_method("none"), max_seq_len=num_tokens, bounded_windows=True)
    spare = sum(layer.kv_values for layer in sizes.layers if (layer.window or num_tokens) < num_tokens)
    states = 4 * (sizes.state_values + sizes.conv_values)
    assert 0 <= kv_bytes(sizes, deployment) + states - cache_bytes(cache) <= 4 * spare


def cache_bytes(cache: Any) -> int:
    return sum(tensor.nbytes for layer in cache.layers for tensor in cached_tensors(layer))


def cached_tensors(layer: Any) -> list[torch.Tensor]:
    states = [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
    kept = [getattr(layer, "keys", None), getattr(layer, "values", None), *states]
    return [tensor for tensor in kept if tensor is not None]


@pytest.mark.parametrize("kind", FEW)
def test_the_weights_of_a_few_families_are_counted_as_they_are_stored(kind: str, tmp_path: Path) -> None:
    check_weights(Variant(kind), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.id)
def test_the_weights_of_every_family_are_counted_as_they_are_stored(variant: Variant, tmp_path: Path) -> None:
    check_weights(variant, tmp_path)


@pytest.mark.parametrize("kind", FEW)
def test_the_cache_of_a_few_families_is_counted_as_transformers_makes_it(kind: str) -> None:
    check_cache(Variant(kind))


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.id)
def test_the_cache_of_every_family_is_counted_as_transformers_makes_it(variant: Variant) -> None:
    check_cache(variant)


def test_a_model_of_several_parts_is_counted_by_its_decoder(tmp_path: Path) -> None:
    model = tiny_family(Variant("gemma3"))
    sizes = from_config_alone(model, tmp_path)
    assert "only the text decoder" in sizes.notes[0]
    decoder = {name for name, _ in model.named_parameters() if "visual" not in name and "vision" not in name}
    decoder -= {name for name in decoder if "multi_modal" in name}
    assert sizes.parameters == sum(weight.numel() for name, weight in model.named_parameters() if name in decoder)


def test_a_state_is_kept_twice_while_draft_tokens_are_verified_and_does_not_grow() -> None:
    sizes = sizes_from_config(tiny_family(Variant("mamba2")).config.to_dict(), "m")
    plain, long = (Deployment(sizes, FP32, draft_method("none"), max_seq_len=length) for length in (20, 2000))
    drafted = Deployment(sizes, FP32, draft_method("ngram"), max_seq_len=20)
    assert state_bytes(sizes, plain) == state_bytes(sizes, long) == 4 * (sizes.state_values + sizes.conv_values)
    assert state_bytes(sizes, drafted) == 2 * state_bytes(sizes, plain) and kv_bytes(sizes, drafted) == 0


def test_every_expert_is_in_memory_and_few_are_used() -> None:
    sizes = sizes_from_config(tiny_family(Variant("qwen3_next")).config.to_dict(), "m")
    assert sizes.expert_parameters == 2 * 4 * 3 * 32 * 24  # layers, experts, matrices, hidden and intermediate size
    assert sizes.parameters - sizes.parameters_per_token >= sizes.expert_parameters // 2  # two of four


def test_the_command_says_what_windows_would_save(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    import json

    from paceline import cli

    tiny_family(Variant("gemma3_text")).config.save_pretrained(tmp_path)
    assert cli.main(["plan", str(tmp_path), "--max-seq-len", "400", "--json"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert any("sliding window" in note and "less" in note for note in document["notes"])


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "fbgemm_fp8"}, "fp8"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "fp8"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}, "int4"),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, "int8"),
    ],
)
def test_a_quantization_config_names_its_precision(config: dict[str, Any], name: str) -> None:
    base = tiny_family(Variant("llama")).config.to_dict()
    sizes = sizes_from_config({**base, "quantization_config": config}, "m")
    assert sizes.stored_precision == name
    assert weight_bytes(sizes, find_precision(name)) < weight_bytes(sizes, find_precision("bf16"))


BIG = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 1000,
    "num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
MATRICES = [(512, 512)] * 4 + [(512, 1024)] * 2 + [(1024, 512)]  # of one layer, inputs by outputs
KEPT = 2 * (2 * 1000 * 512 + 5 * 512)  # tables and norms in 16 bits


def groups_of_128(inputs: int, outputs: int) -> int:
    """qweight and qzeros of eight numbers in 32 bits, and scales of 16 bits, as AWQ and GPTQ store them."""
    return inputs * outputs // 8 * 4 + inputs // 128 * outputs // 8 * 4 + inputs // 128 * outputs * 2


def nf4(inputs: int, outputs: int) -> int:
    """Two numbers in a byte, absmax of 64 numbers in a byte, and a float for every 256 of those."""
    return inputs * outputs // 2 + inputs * outputs // 64 + inputs * outputs // 64 // 256 * 4


@pytest.mark.parametrize(("name", "stored"), [("awq", groups_of_128), ("gptq", groups_of_128), ("nf4", nf4)])
def test_a_format_is_counted_as_its_tensors_are_laid_out(name: str, stored: Any) -> None:
    sizes = sizes_from_config(BIG, "m")
    expected = KEPT + 2 * sum(stored(*shape) for shape in MATRICES)
    assert weight_bytes(sizes, find_precision(name)) == expected


def test_mxfp4_packs_the_experts_and_nothing_else() -> None:
    sizes = sizes_from_config(tiny_family(Variant("gpt_oss")).config.to_dict(), "m")
    rest = sizes.parameters - sizes.expert_parameters
    blocks = sizes.expert_parameters // 32
    assert weight_bytes(sizes, find_precision("mxfp4")) == 2 * rest + 17 * blocks
