"""Mistral: Llama without biases. Checkpoints with a sliding window run through transformers."""

from __future__ import annotations

from typing import Any

from paceline.models.config import ArchConfig, arch_config
from paceline.models.llama import load, unsupported

__all__ = ["MODEL_TYPES", "config_from_hf", "load", "unsupported"]

MODEL_TYPES = ("mistral",)


def config_from_hf(config: Any) -> ArchConfig:
    return arch_config(config)
