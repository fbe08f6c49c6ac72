"""Tiny models of every architecture, random but with weights large enough that every part of a layer matters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import (
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

KINDS: dict[str, Any] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
}
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


def tiny(kind: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    config, model_class, differences = KINDS[kind]
    model = model_class(config(**(SIZES | differences | changes))).eval()
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
