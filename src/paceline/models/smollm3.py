"""SmolLM3: Llama with layers that do not rotate queries and keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.layers.attention import PLAIN_ATTENTION, LayerAttention
from paceline.models import llama
from paceline.models.config import ArchConfig
from paceline.models.llama import load, unsupported

__all__ = ["MODEL_TYPES", "config_from_hf", "load", "unsupported"]

MODEL_TYPES = ("smollm3",)


def config_from_hf(config: Any) -> ArchConfig:
    plain = llama.config_from_hf(config)
    rotated = config.no_rope_layers[: plain.num_layers]  # the field is named for its zeros
    kinds = tuple(PLAIN_ATTENTION if layer else LayerAttention(rope=None) for layer in rotated)
    return replace(plain, layer_attention=kinds)
