"""Mixtral: Mistral with a mixture of experts in the place of the MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.models import mistral
from paceline.models.checkpoint import ModelCheckpoint
from paceline.models.config import ArchConfig, MoeConfig
from paceline.models.decoder import DecoderModel
from paceline.models.experts import ExpertNames, load_moe, unsupported_experts

MODEL_TYPES = ("mixtral",)
NAMES = ExpertNames(blocks=("block_sparse_moe.", "mlp."), gate_up=("w1", "w3"), down="w2")


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    return unsupported_experts(config) or mistral.unsupported(config)


def config_from_hf(config: Any) -> ArchConfig:
    moe = MoeConfig(config.num_local_experts, config.num_experts_per_tok, config.intermediate_size)
    return replace(mistral.config_from_hf(config), moe=moe)


def load(checkpoint: ModelCheckpoint, config: ArchConfig) -> DecoderModel:
    return load_moe(checkpoint, config, NAMES)
