"""Command A and R7B: Command R whose layers have a sliding window and a rope, or neither."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.layers.attention import LayerAttention
from paceline.models import cohere
from paceline.models.cohere import load
from paceline.models.config import ArchConfig, layer_windows, unsupported_field

__all__ = ["MODEL_TYPES", "config_from_hf", "load", "unsupported"]

MODEL_TYPES = ("cohere2",)


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    return unsupported_field(config, ("logit_scale", "rope_interleaved", "sliding_window"))


def config_from_hf(config: Any) -> ArchConfig:
    windows = layer_windows(config)
    kinds = [LayerAttention(window=window, rope=None if window is None else 0) for window in windows]
    return replace(cohere.config_from_hf(config), layer_attention=tuple(kinds))
