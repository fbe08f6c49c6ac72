"""ERNIE 4.5 without experts: Llama with a rope whose pairs lie side by side, and biases everywhere or nowhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.models.config import ArchConfig, arch_config, unsupported_field
from paceline.models.llama import load

__all__ = ["MODEL_TYPES", "config_from_hf", "load", "unsupported"]

MODEL_TYPES = ("ernie4_5",)


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    return unsupported_field(config, ("rope_interleaved",))


def config_from_hf(config: Any) -> ArchConfig:
    bias = bool(config.use_bias)
    return replace(arch_config(config, qkv_bias=bias, output_bias=bias, interleaved_rope=True), mlp_bias=bias)
