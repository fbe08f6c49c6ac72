"""Qwen3-Next: Qwen3.5 with experts, and the input projections of its gated delta nets stored key head by key head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from paceline.layers.feed_forward import Mlp
from paceline.layers.linear_attention import DeltaNetSizes
from paceline.models import qwen3_5
from paceline.models.checkpoint import ModelCheckpoint
from paceline.models.config import ArchConfig
from paceline.models.decoder import DecoderModel
from paceline.models.experts import qwen_moe_config, read_experts
from paceline.models.qwen3_5 import DeltaNetNames, read_hybrid, unsupported

__all__ = ["MODEL_TYPES", "config_from_hf", "load", "unsupported"]

MODEL_TYPES = ("qwen3_next",)


def config_from_hf(config: Any) -> ArchConfig:
    moe = qwen_moe_config(config, shared_intermediate_size=config.shared_expert_intermediate_size)
    return replace(qwen3_5.config_from_hf(config), moe=moe)


def load(checkpoint: ModelCheckpoint, config: ArchConfig) -> DecoderModel:
    """Read a model. Raises WeightsError that names a tensor which is missing, of another shape, or not used."""
    return read_hybrid(checkpoint, config, DeltaNetNames(("in_proj_qkvz", "in_proj_ba"), by_key_head), read_mlp)


def read_mlp(checkpoint: ModelCheckpoint, config: ArchConfig, index: int) -> Mlp:
    """Experts, or in some layers an MLP."""
    return read_experts(checkpoint, config, index) or qwen3_5.read_mlp(checkpoint, config, index)


def by_key_head(sizes: DeltaNetSizes) -> list[int]:
    """Rows as `gated_delta_net` reads them: all queries, keys, values, strengths, decays and gates.

    Stored, each key head has its query, key, values and gates together, and behind all its strengths and decays.
    """
    heads, group = sizes.num_key_heads, sizes.num_value_heads // sizes.num_key_heads
    values = group * sizes.value_dim
    stored = [sizes.key_dim, sizes.key_dim, values, values]
    queries, keys, mixed, gates = torch.split(torch.arange(heads * sum(stored)).view(heads, -1), stored, dim=1)
    strengths, decays = (torch.arange(2 * group * heads) + heads * sum(stored)).view(heads, 2, group).unbind(1)
    return torch.cat([part.flatten() for part in (queries, keys, mixed, strengths, decays, gates)]).tolist()
