"""Qwen3.5 with experts in the place of every MLP. Checkpoints with a vision part run as the language model in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.models import qwen3_5
from paceline.models.checkpoint import ModelCheckpoint
from paceline.models.config import ArchConfig, MoeConfig
from paceline.models.decoder import DecoderModel
from paceline.models.qwen3_5 import SEPARATE, read_hybrid, unsupported
from paceline.models.qwen3_next import read_mlp

__all__ = ["MODEL_TYPES", "config_from_hf", "load", "unsupported"]

MODEL_TYPES = ("qwen3_5_moe_text", "qwen3_5_moe")


def config_from_hf(config: Any) -> ArchConfig:
    text = config.get_text_config()
    moe = MoeConfig(
        num_experts=text.num_experts,
        top_k=text.num_experts_per_tok,
        intermediate_size=text.moe_intermediate_size,
        renormalize=True,
        shared_intermediate_size=text.shared_expert_intermediate_size,
    )
    return replace(qwen3_5.config_from_hf(config), moe=moe)


def load(checkpoint: ModelCheckpoint, config: ArchConfig) -> DecoderModel:
    """Read a model. Raises WeightsError that names a tensor which is missing, of another shape, or not used."""
    return read_hybrid(checkpoint, config, SEPARATE, read_mlp)
