"""Qwen3-MoE: Qwen3 with a mixture of experts in the place of the MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.models import qwen3
from paceline.models.config import ArchConfig
from paceline.models.experts import load_moe, qwen_moe_config, unsupported_experts

MODEL_TYPES = ("qwen3_moe",)
load = load_moe


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    return unsupported_experts(config) or qwen3.unsupported(config)


def config_from_hf(config: Any) -> ArchConfig:
    return replace(qwen3.config_from_hf(config), moe=qwen_moe_config(config))
