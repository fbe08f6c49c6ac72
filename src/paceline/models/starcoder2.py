"""StarCoder2: layer norms, biases everywhere, and an MLP without a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.layers.decoder_layer import DecoderLayer
from paceline.models.checkpoint import ModelCheckpoint
from paceline.models.config import ArchConfig, NormKind, arch_config, mixed_windows, unsupported_field
from paceline.models.decoder import DecoderModel
from paceline.models.llama import read_layer, read_model, read_plain_mlp

MODEL_TYPES = ("starcoder2",)


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    return mixed_windows(config) or unsupported_field(config, ("sliding_window",))


def config_from_hf(config: Any) -> ArchConfig:
    bias = bool(config.use_bias)
    sizes = arch_config(config, qkv_bias=bias, output_bias=bias, eps="norm_epsilon")
    return replace(sizes, norm_kind=NormKind.LAYER, mlp_bias=bias)


def load(checkpoint: ModelCheckpoint, config: ArchConfig) -> DecoderModel:
    """Read a model. Raises WeightsError that names a tensor which is missing, of another shape, or not used."""
    return read_model(checkpoint, config, [_layer(checkpoint, config, index) for index in range(config.num_layers)])


def _layer(checkpoint: ModelCheckpoint, config: ArchConfig, index: int) -> DecoderLayer:
    prefix = f"model.layers.{index}.mlp."
    mlp = read_plain_mlp(checkpoint, config, f"{prefix}c_fc", f"{prefix}c_proj")
    return read_layer(checkpoint, config, index, mlp=mlp)
