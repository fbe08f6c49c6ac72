"""Granite-MoE: Granite with a mixture of experts in the place of the MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.models import granite
from paceline.models.checkpoint import ModelCheckpoint
from paceline.models.config import ArchConfig, MoeConfig
from paceline.models.decoder import DecoderModel
from paceline.models.experts import ExpertNames, load_moe, unsupported_experts

MODEL_TYPES = ("granitemoe",)
NAMES = ExpertNames(
    blocks=("block_sparse_moe.",),
    routers=("router.layer", "router"),
    stacked=(("input_linear.weight", "output_linear.weight"), ("experts.gate_up_proj", "experts.down_proj")),
)


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    return unsupported_experts(config) or granite.unsupported(config)


def config_from_hf(config: Any) -> ArchConfig:
    moe = MoeConfig(config.num_local_experts, config.num_experts_per_tok, config.intermediate_size)
    return replace(granite.config_from_hf(config), moe=moe)


def load(checkpoint: ModelCheckpoint, config: ArchConfig) -> DecoderModel:
    return load_moe(checkpoint, config, NAMES)
