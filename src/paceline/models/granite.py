"""Granite: Llama with multipliers of the embedding, attention scores, residual sums and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.layers.attention import LayerAttention
from paceline.models import llama
from paceline.models.config import ArchConfig, unsupported_field
from paceline.models.llama import load

__all__ = ["MODEL_TYPES", "config_from_hf", "load", "unsupported"]

MODEL_TYPES = ("granite",)
MULTIPLIERS = ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier")


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    return unsupported_field(config, (*MULTIPLIERS, "mlp_bias"))


def config_from_hf(config: Any) -> ArchConfig:
    plain = llama.config_from_hf(config)
    return replace(
        plain,
        layer_attention=(LayerAttention(scale=float(config.attention_multiplier)),) * plain.num_layers,
        embedding_multiplier=float(config.embedding_multiplier),
        residual_multiplier=float(config.residual_multiplier),
        logits_multiplier=1.0 / float(config.logits_scaling),
    )
