"""GLM-4: GLM with a norm after attention and one after the MLP, too."""

from __future__ import annotations

from dataclasses import replace

from paceline.models import glm
from paceline.models.checkpoint import ModelCheckpoint
from paceline.models.config import ArchConfig
from paceline.models.decoder import DecoderModel
from paceline.models.glm import config_from_hf, unsupported
from paceline.models.llama import read_layer, read_model

__all__ = ["MODEL_TYPES", "config_from_hf", "load", "unsupported"]

MODEL_TYPES = ("glm4",)
NAMES = replace(glm.NAMES, attention_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm")


def load(checkpoint: ModelCheckpoint, config: ArchConfig) -> DecoderModel:
    """Read a model. Raises WeightsError that names a tensor which is missing, of another shape, or not used."""
    layers = [read_layer(checkpoint, config, index, NAMES) for index in range(config.num_layers)]
    return read_model(checkpoint, config, layers)
