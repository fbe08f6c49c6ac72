"""Seed-OSS: Llama with a bias on queries, keys and values, and one on the output by a setting of its own."""

from __future__ import annotations

from typing import Any

from paceline.models.config import ArchConfig, arch_config
from paceline.models.llama import load, unsupported

__all__ = ["MODEL_TYPES", "config_from_hf", "load", "unsupported"]

MODEL_TYPES = ("seed_oss",)


def config_from_hf(config: Any) -> ArchConfig:
    return arch_config(config, qkv_bias=bool(config.attention_bias), output_bias=bool(config.attention_out_bias))
