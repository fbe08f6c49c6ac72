"""Every architecture against transformers in float64, and what each of them refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma3TextConfig, GPT2Config, LlamaConfig, MistralConfig, Qwen2Config

from paceline.core.types import Row
from paceline.models import llama, registry
from paceline.runners.huggingface_model import context_length
from paceline.runners.native import NativeRunner, is_native
from tests.runners.native.models import tiny

PROMPTS = [list(range(3, 40)), [7, 7, 9], list(range(90, 20, -1))]
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True}),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    ("gemma2", {}),
    ("gemma2", {"tie_word_embeddings": False, "final_logit_softcapping": None, "attn_logit_softcapping": 2.0}),
    ("gemma2", {"attention_bias": True}),
    ("gemma3_text", {}),
    ("gemma3_text", {"rope_parameters": GEMMA3_ROPES, "final_logit_softcapping": 5.0}),
    ("mistral", {}),
    ("mistral", {"sliding_window": 16}),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    ("qwen3", {}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    ("qwen3", {"attention_bias": True}),
]


@pytest.mark.parametrize(("kind", "changes"), VARIANTS)
def test_logits_agree_with_transformers_in_float64(kind: str, changes: dict[str, Any]) -> None:
    model = tiny(kind, torch.float64, **changes)
    runner = NativeRunner.of_model(model, kind, kv_cache_tokens=2048)
    outputs = runner.forward([Row.chain(runner.new_cache(), prompt) for prompt in PROMPTS])
    for output, prompt in zip(outputs, PROMPTS):
        with torch.no_grad():
            expected = model(torch.tensor([prompt])).logits[0]
        torch.testing.assert_close(output.logits, expected, rtol=5e-5, atol=5e-5)  # transformers rotates in float32


REFUSED: list[tuple[Any, str]] = [
    (MistralConfig(mlp_bias=True), "mlp_bias"),
    (LlamaConfig(hidden_act="quick_gelu"), "hidden_act"),
    (LlamaConfig(attn_logit_softcapping=50.0), "attn_logit_softcapping"),
    (LlamaConfig(quantization_config={"quant_method": "hqq"}), "quantization_config"),
    (LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "rope_type"),
    (
        LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        "partial_rotary_factor",
    ),
    (LlamaConfig(sliding_window=4096), "sliding_window"),
    (MistralConfig(sliding_window=64, layer_types=["full_attention"] * 32), "layer_types"),
    (Qwen2Config(layer_types=["chunked_attention"] * 32), "chunked_attention"),
    (Gemma2Config(use_bidirectional_attention=True), "use_bidirectional_attention"),
    (Gemma3TextConfig(attn_logit_softcapping=20.0), "attn_logit_softcapping"),
    (GPT2Config(), "gpt2"),
]


@pytest.mark.parametrize(("config", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_a_computation_that_layers_do_not_have_is_refused_with_the_reason(config: Any, reason: str) -> None:
    assert not is_native(config)
    assert reason in (registry.unsupported(config) or "")


@pytest.mark.parametrize("config", [LlamaConfig(attention_bias=True), MistralConfig(sliding_window=4096)])
def test_what_layers_have_is_native(config: Any) -> None:
    assert is_native(config)


@pytest.mark.parametrize(("length", "expected"), [(40960, 131072), (262144, 262144)])
def test_yarn_lengthens_a_sequence_that_the_config_does_not(length: int, expected: int) -> None:
    """Model cards add the rope to a config and leave its max_position_embeddings as it is."""
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
    config = LlamaConfig(max_position_embeddings=length, rope_parameters=rope)
    assert llama.config_from_hf(config).max_seq_len == context_length(config) == expected
    plain = LlamaConfig(max_position_embeddings=length)
    assert llama.config_from_hf(plain).max_seq_len == context_length(plain) == length


@pytest.mark.slow
def test_gemma3_with_a_part_that_reads_images_runs_as_its_text_part(tmp_path: Path) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = tiny("gemma3_text").config
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1, image_token_index=100)
    model = Gemma3ForConditionalGeneration(config).double().eval()
    model.save_pretrained(tmp_path)
    prompt = PROMPTS[2]
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0]
    read = NativeRunner.load(tmp_path, "gemma3", "float64", "cpu", 256)
    for runner in (read, NativeRunner.of_model(model, "gemma3", 256)):
        output = runner.forward([Row.chain(runner.new_cache(), prompt)])
        torch.testing.assert_close(output.logits, expected, rtol=1e-5, atol=1e-5)
