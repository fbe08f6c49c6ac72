"""OLMo 2: norms after attention and after the MLP instead of before, and norms of all queries and of all keys."""

from __future__ import annotations

from dataclasses import replace

from paceline.layers.attention import HeadNorms
from paceline.layers.decoder_layer import DecoderLayer
from paceline.models.checkpoint import ModelCheckpoint
from paceline.models.config import ArchConfig
from paceline.models.decoder import DecoderModel
from paceline.models.llama import LayerNames, config_from_hf, read_layer, read_model, unsupported

__all__ = ["MODEL_TYPES", "config_from_hf", "load", "unsupported"]

MODEL_TYPES = ("olmo2",)
NAMES = LayerNames(
    attention_norm=None,
    attention_post_norm="post_attention_layernorm",
    mlp_norm=None,
    mlp_post_norm="post_feedforward_layernorm",
)


def load(checkpoint: ModelCheckpoint, config: ArchConfig) -> DecoderModel:
    """Read a model. Raises WeightsError that names a tensor which is missing, of another shape, or not used."""
    layers = [_layer(checkpoint, config, index) for index in range(config.num_layers)]
    return read_model(checkpoint, config, layers)


def _layer(checkpoint: ModelCheckpoint, config: ArchConfig, index: int) -> DecoderLayer:
    prefix = f"model.layers.{index}.self_attn."
    query = checkpoint.tensor(f"{prefix}q_norm.weight", config.query_size)
    key = checkpoint.tensor(f"{prefix}k_norm.weight", config.kv_size)
    return replace(read_layer(checkpoint, config, index, NAMES), projection_norms=HeadNorms(query, key))
