"""Arcee: Llama with an MLP without a gate."""

from __future__ import annotations

from paceline.layers.decoder_layer import DecoderLayer
from paceline.models.checkpoint import ModelCheckpoint
from paceline.models.config import ArchConfig
from paceline.models.decoder import DecoderModel
from paceline.models.llama import config_from_hf, read_layer, read_model, read_plain_mlp, unsupported

__all__ = ["MODEL_TYPES", "config_from_hf", "load", "unsupported"]

MODEL_TYPES = ("arcee",)


def load(checkpoint: ModelCheckpoint, config: ArchConfig) -> DecoderModel:
    """Read a model. Raises WeightsError that names a tensor which is missing, of another shape, or not used."""
    return read_model(checkpoint, config, [_layer(checkpoint, config, index) for index in range(config.num_layers)])


def _layer(checkpoint: ModelCheckpoint, config: ArchConfig, index: int) -> DecoderLayer:
    prefix = f"model.layers.{index}.mlp."
    mlp = read_plain_mlp(checkpoint, config, f"{prefix}up_proj", f"{prefix}down_proj")
    return read_layer(checkpoint, config, index, mlp=mlp)
