"""Tiny models of every architecture, random but with weights large enough that every part of a layer matters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from paceline.layers.attention import LayerAttention
from paceline.layers.rope import RopeConfig
from paceline.models.decoder import DecoderModel

SLIDING_THEN_FULL = ["sliding_attention", "full_attention"]
KINDS: dict[str, Any] = {
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"sliding_window": 16, "query_pre_attn_scalar": 24}),
    "gemma3_text": (
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {"sliding_window": 16, "query_pre_attn_scalar": 24, "layer_types": SLIDING_THEN_FULL},
    ),
    "gpt_oss": (
        GptOssConfig,
        GptOssForCausalLM,
        {"sliding_window": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
}
# Architectures that differ from Llama in parts of a layer: each with settings that let all its parts matter.
SMALL_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # some defaults are past a small vocabulary
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1e4}
DENSE: dict[str, dict[str, Any]] = {
    "arcee": {},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"logit_scale": 0.3, "hidden_size": 192, "sliding_window": 16, "layer_types": SLIDING_THEN_FULL},
    "ernie4_5": {"use_bias": True},
    "exaone4": {"sliding_window": 16, "layer_types": SLIDING_THEN_FULL},
    "gemma": {},
    "glm": {},
    "glm4": {},
    "gpt_neox": {"hidden_size": 192, "num_key_value_heads": None},
    "granite": {
        "attention_multiplier": 0.3,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 5.0,
    },
    "ministral": {"sliding_window": 16, "layer_types": SLIDING_THEN_FULL},
    "ministral3": {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.5}},
    "olmo2": {},
    "olmo3": {
        "sliding_window": 16,
        "layer_types": SLIDING_THEN_FULL,
        "rope_parameters": {"sliding_attention": DEFAULT_ROPE, "full_attention": YARN},
    },
    "phi": {},
    "phi3": {"sliding_window": 16},
    "seed_oss": {"attention_bias": True, "attention_out_bias": True},
    "smollm3": {"no_rope_layer_interval": 2},
    "stablelm": {"hidden_size": 192, "use_qkv_bias": True},
    "starcoder2": {},
    "vaultgemma": {"sliding_window": 16, "layer_types": SLIDING_THEN_FULL},
}
KINDS |= {
    kind: (CONFIG_MAPPING[kind], AutoModelForCausalLM.from_config, SMALL_IDS | changes)
    for kind, changes in DENSE.items()
}
# Mixtures of experts: few enough that rows share some, and enough that an expert may have no row.
QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
MOE: dict[str, dict[str, Any]] = {
    "granitemoe": DENSE["granite"] | {"num_local_experts": 6, "num_experts_per_tok": 3},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2, "hidden_size": 192},
    "qwen2_moe": QWEN_EXPERTS | {"shared_expert_intermediate_size": 56},
    "qwen3_moe": QWEN_EXPERTS | {"norm_topk_prob": True},
}
KINDS |= {
    kind: (CONFIG_MAPPING[kind], AutoModelForCausalLM.from_config, SMALL_IDS | changes)
    for kind, changes in MOE.items()
}
WINDOWED = ("gemma2", "gemma3_text", "gpt_oss")  # with attention that Llama's is not
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 101,
    "max_position_embeddings": 1024,
}


# Of a model whose pass a GPU runs as one kernel, in bfloat16.
ONE_KERNEL_SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1003,
}


def tiny(kind: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    config, model_class, differences = KINDS[kind]
    model = model_class(config(**(SIZES | differences | changes))).eval()
    if kind == "gpt_oss":
        model.set_experts_implementation("eager")  # the only one that has float64
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator) * 0.2
            weight.copy_(noise if weight.dim() > 1 else 1.0 + noise)
    return model.to(dtype)


def with_attention(model: DecoderModel, kinds: list[LayerAttention]) -> DecoderModel:
    """The same weights with other attention in each layer, and a second rope table that turns half as fast."""
    slower = RopeConfig(model.config.rope.frequencies / 2)
    layers: list[Any] = [replace(layer, attention=kind) for layer, kind in zip(model.layers, kinds)]
    config = replace(model.config, layer_attention=tuple(kinds), other_ropes=(slower,))
    return replace(model, config=config, layers=layers)
