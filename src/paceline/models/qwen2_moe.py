"""Qwen2-MoE: Qwen2 with a mixture of experts in the place of the MLP, and one expert that every token passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.models import qwen2
from paceline.models.config import ArchConfig
from paceline.models.experts import load_moe, qwen_moe_config, unsupported_experts

MODEL_TYPES = ("qwen2_moe",)
load = load_moe


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    return unsupported_experts(config) or qwen2.unsupported(config)


def config_from_hf(config: Any) -> ArchConfig:
    moe = qwen_moe_config(config, shared_intermediate_size=config.shared_expert_intermediate_size)
    return replace(qwen2.config_from_hf(config), qkv_bias=bool(config.qkv_bias), moe=moe)
