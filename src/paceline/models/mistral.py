"""Mistral: Llama without biases, and in some checkpoints with a sliding window in every layer."""

from __future__ import annotations

from typing import Any

from paceline.models.config import ArchConfig, arch_config, mixed_windows, unsupported_field
from paceline.models.llama import load

__all__ = ["MODEL_TYPES", "config_from_hf", "load", "unsupported"]

MODEL_TYPES = ("mistral",)


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    return mixed_windows(config) or unsupported_field(config, ("sliding_window",))


def config_from_hf(config: Any) -> ArchConfig:
    return arch_config(config)
