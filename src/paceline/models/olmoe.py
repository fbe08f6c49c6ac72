"""OLMoE: Llama with norms of all queries and of all keys, and a mixture of experts in the place of the MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.layers.attention import HeadNorms
from paceline.layers.decoder_layer import DecoderLayer
from paceline.models import llama
from paceline.models.checkpoint import ModelCheckpoint
from paceline.models.config import ArchConfig, MoeConfig
from paceline.models.decoder import DecoderModel
from paceline.models.experts import read_experts, unsupported_experts
from paceline.models.llama import read_layer, read_model

MODEL_TYPES = ("olmoe",)


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    if getattr(config, "clip_qkv", None) is not None:
        return f"clip_qkv is {config.clip_qkv}"
    return unsupported_experts(config) or llama.unsupported(config)


def config_from_hf(config: Any) -> ArchConfig:
    experts, top_k = config.num_experts, config.num_experts_per_tok
    moe = MoeConfig(experts, top_k, config.intermediate_size, renormalize=bool(config.norm_topk_prob))
    return replace(llama.config_from_hf(config), moe=moe)


def load(checkpoint: ModelCheckpoint, config: ArchConfig) -> DecoderModel:
    """Read a model. Raises WeightsError that names a tensor which is missing, of another shape, or not used."""
    return read_model(checkpoint, config, [_layer(checkpoint, config, index) for index in range(config.num_layers)])


def _layer(checkpoint: ModelCheckpoint, config: ArchConfig, index: int) -> DecoderLayer:
    prefix = f"model.layers.{index}.self_attn."
    query = checkpoint.tensor(f"{prefix}q_norm.weight", config.query_size)
    key = checkpoint.tensor(f"{prefix}k_norm.weight", config.kv_size)
    layer = read_layer(checkpoint, config, index, mlp=read_experts(checkpoint, config, index))
    return replace(layer, projection_norms=HeadNorms(query, key))
