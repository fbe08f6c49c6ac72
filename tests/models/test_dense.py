"""Architectures that differ from Llama in parts of a layer: every kind of pass against transformers in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from paceline.core.types import Row
from paceline.errors import CapabilityError, WeightsError
from paceline.layers.rope import arranged, head_order, in_order, rope_cache, rotary_frequencies
from paceline.models import registry
from paceline.runners.native import NativeRunner, is_native
from paceline.runners.native.lora_runner import LoraRunner
from tests.runners.native.models import DENSE, WINDOWED, YARN, tiny
from tests.support.agreement import PROMPTS, assert_agrees, logits_of
from tests.support.lora import merged, write_adapter

HALF_ROTATED = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
VARIANTS: list[tuple[str, dict[str, Any]]] = [(kind, {}) for kind in DENSE] + [
    ("arcee", {"mlp_bias": True}),
    ("cohere", {"attention_bias": True}),
    ("cohere2", {"attention_bias": True, "tie_word_embeddings": False}),
    ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    ("gemma", {"attention_bias": True}),
    ("glm", {"attention_bias": False, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    ("gpt_neox", {"use_parallel_residual": False, "attention_bias": False}),
    ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("llama", {"mlp_bias": True}),
    ("llama", {"hidden_act": "gelu"}),
    ("llama", {"rope_parameters": YARN}),
    ("ministral", {"layer_types": ["full_attention"] * 2}),
    ("ministral3", {"sliding_window": 16}),
    ("olmo2", {"attention_bias": True}),
    ("phi3", {"rope_parameters": HALF_ROTATED, "sliding_window": None}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 16, "mlp_bias": True}),
    ("stablelm", {"use_parallel_residual": True}),
    ("starcoder2", {"use_bias": False, "tie_word_embeddings": False, "sliding_window": 16}),
    ("gemma2", {}),
    ("gemma2", {"attn_logit_softcapping": 2.0, "sliding_window": 5}),
    ("gemma3_text", {}),
    ("gpt_oss", {}),
    ("gpt_oss", {"sliding_window": 3, "swiglu_limit": 0.5, "attention_bias": False}),
    ("mistral", {"sliding_window": 5}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
]
IDS = ["-".join([kind, *changes]) for kind, changes in VARIANTS]
TOLERANCE = 5e-5  # transformers rotates and norms in float32


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "changes"), VARIANTS, ids=IDS)
def test_chains_trees_and_batches_agree_with_transformers_in_float64(kind: str, changes: dict[str, Any]) -> None:
    model = tiny(kind, torch.float64, **changes)
    assert_agrees(NativeRunner.of_model(model, kind, kv_cache_tokens=2048), model, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*DENSE, *WINDOWED])
def test_integer_weights_give_nearly_the_same_logits(kind: str) -> None:
    model = tiny(kind)
    runner = NativeRunner.of_model(model, kind, kv_cache_tokens=512, weight_format="int8")
    expected = logits_of(model, PROMPTS[0])
    logits = runner.forward([Row.chain(runner.new_cache(), PROMPTS[0])]).logits
    # Wrong rows or scales differ by more than the norm. Some CPUs have a bit less for a weight (quantization/int8.py).
    assert (logits - expected).norm() / expected.norm() < 0.15


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*DENSE, *WINDOWED])
def test_a_folder_loads_with_every_tensor_used(kind: str, tmp_path: Path) -> None:
    model = tiny(kind)
    model.save_pretrained(tmp_path)
    runner = NativeRunner.load(tmp_path, kind, "float32", "cpu", 512)
    logits = runner.forward([Row.chain(runner.new_cache(), PROMPTS[0])]).logits
    torch.testing.assert_close(logits, logits_of(model, PROMPTS[0]), rtol=1e-3, atol=1e-3)


# --- ropes that rotate other pairs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [8, 4, 2])
def test_the_order_of_a_head_makes_pairs_of_its_halves(rotated: int, interleaved: bool) -> None:
    order = head_order(8, rotated, interleaved)
    assert sorted(order) == list(range(8))
    step = 1 if interleaved else rotated // 2
    pairs = {(order[place], order[place + 4]) for place in range(rotated // 2)}
    inside = {max(pair) for pair in pairs} <= set(range(rotated))
    assert inside and all(second - first == step for first, second in pairs)


def test_a_whole_head_keeps_its_order_and_a_part_is_not_scaled() -> None:
    assert arranged(rotary_frequencies(8, 1e4), 8).order is None
    rope = arranged(rotary_frequencies(4, 1e4), 8, 2.0)
    cosines = rope_cache(rope, 3, torch.device("cpu"))[:, 0]
    assert cosines[0].tolist() == [2.0, 2.0, 1.0, 1.0] and cosines[2, 2:].tolist() == [1.0, 1.0]
    rows = torch.arange(16)
    assert in_order(rows, rope.order).tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]


@pytest.mark.parametrize("kind", ["glm", "starcoder2"])  # heads in another order; layers with another MLP
def test_an_adapter_for_queries_and_keys_gives_the_merged_model(kind: str, tmp_path: Path) -> None:
    modules = ("q_proj", "k_proj", "v_proj", "o_proj")
    folder = write_adapter(tmp_path / "adapter", tiny(kind), 1, modules=modules)
    runner = LoraRunner.of_model(tiny(kind, torch.float64), kind, kv_cache_tokens=512)
    runner.read_adapters({"adapter": str(folder)})
    cache = runner.new_cache()
    cache.lora = "adapter"
    logits = runner.forward([Row.chain(cache, PROMPTS[0])]).logits
    expected = logits_of(merged(tiny(kind, torch.float64), folder), PROMPTS[0])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


REFUSED_ADAPTERS = [("arcee", "up_proj"), ("glm4", "gate_up_proj"), ("phi3", "qkv_proj"), ("starcoder2", "c_fc")]


@pytest.mark.parametrize(("kind", "module"), REFUSED_ADAPTERS)
def test_an_adapter_for_parts_that_llama_has_not_is_refused(kind: str, module: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", tiny(kind), 1, modules=(module,))
    runner = LoraRunner.of_model(tiny(kind), kind, kv_cache_tokens=512)
    with pytest.raises(CapabilityError, match=f"{module}|MLP"):
        runner.read_adapters({"adapter": str(folder)})


# --- what is refused --------------------------------------------------------------------------------------------------

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 4096}, "longrope"),
    ("glm", {"quantization_config": {"quant_method": "compressed-tensors"}}, "quantization_config"),
    ("granite", {"hidden_act": "quick_gelu"}, "hidden_act"),
    ("ministral3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "llama_4_scaling_beta"),
    ("olmo2", {"sliding_window": 16}, "sliding_window"),
    ("cohere", {"use_qk_norm": True}, "use_qk_norm"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("stablelm", {"qk_layernorm": True}, "qk_layernorm"),
    ("phi", {"qk_layernorm": True}, "qk_layernorm"),
    # transformers gives these windows to other layers than layer_types names.
    ("phi3", {"sliding_window": 7, "layer_types": ["full_attention"] * 32}, "sliding_window"),
    ("starcoder2", {"sliding_window": 7, "layer_types": ["full_attention"] * 30}, "sliding_window"),
    ("smollm3", {"sliding_window": 7, "layer_types": ["sliding_attention"] * 36}, "use_sliding_window"),
]


@pytest.mark.parametrize(("kind", "changes", "reason"), REFUSED, ids=[f"{kind}-{why}" for kind, _, why in REFUSED])
def test_what_an_architecture_does_not_compute_is_refused_with_the_reason(
    kind: str, changes: dict[str, Any], reason: str
) -> None:
    config = CONFIG_MAPPING[kind](**changes)
    assert not is_native(config) and reason in (registry.unsupported(config) or "")


def test_a_missing_norm_is_named(tmp_path: Path) -> None:
    model = tiny("glm4")
    state = {name: tensor for name, tensor in model.state_dict().items() if "1.post_mlp_layernorm" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(WeightsError, match=r"model\.layers\.1\.post_mlp_layernorm\.weight"):
        NativeRunner.load(tmp_path, "glm4", "float32", "cpu", 128)
