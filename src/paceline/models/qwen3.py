"""Qwen3: Llama with norms of queries and keys, head by head."""

from __future__ import annotations

from typing import Any

from paceline.models.config import ArchConfig, arch_config, unsupported_field
from paceline.models.llama import load

__all__ = ["MODEL_TYPES", "config_from_hf", "load", "unsupported"]

MODEL_TYPES = ("qwen3",)


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    return unsupported_field(config, ("sliding_window",))


def config_from_hf(config: Any) -> ArchConfig:
    bias = bool(getattr(config, "attention_bias", False))
    return arch_config(config, qkv_bias=bias, output_bias=bias, qk_norm=True)
