"""Mistral: Llama without biases, and in some checkpoints with a sliding window in every layer."""

from __future__ import annotations

from typing import Any

from paceline.models.config import ArchConfig, arch_config, layer_windows, unsupported_field
from paceline.models.llama import load

__all__ = ["MODEL_TYPES", "config_from_hf", "load", "unsupported"]

MODEL_TYPES = ("mistral",)


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    window = getattr(config, "sliding_window", None)
    if any(layer != window for layer in layer_windows(config)):
        return "layer_types has full_attention beside a sliding_window, which Mistral's layers all have"
    return unsupported_field(config, ("sliding_window",))


def config_from_hf(config: Any) -> ArchConfig:
    return arch_config(config)
