"""SmolLM3: Llama with layers that do not rotate queries and keys, and in some checkpoints with windows there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.models import llama
from paceline.models.config import ArchConfig, unsupported_field
from paceline.models.llama import load

__all__ = ["MODEL_TYPES", "config_from_hf", "load", "unsupported"]

MODEL_TYPES = ("smollm3",)


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    # transformers masks sliding layers whatever use_sliding_window says.
    has_window = config.sliding_window and config.use_sliding_window
    if "sliding_attention" in (config.layer_types or ()) and not has_window:
        return "layer_types has sliding_attention, and use_sliding_window or sliding_window is not set"
    return unsupported_field(config, ("mlp_bias", "sliding_window"))


def config_from_hf(config: Any) -> ArchConfig:
    plain = llama.config_from_hf(config)
    rotated = config.no_rope_layers[: plain.num_layers]  # the field is named for its zeros
    kinds = [replace(plain.attention(index), rope=0 if layer else None) for index, layer in enumerate(rotated)]
    return replace(plain, layer_attention=tuple(kinds))
