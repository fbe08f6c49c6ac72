"""StarCoder2: layer norms, biases everywhere, and an MLP without a gate."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.layers.feed_forward import PlainMlp
from paceline.models.checkpoint import ModelCheckpoint
from paceline.models.config import ArchConfig, NormKind, arch_config, unsupported_field
from paceline.models.decoder import DecoderModel
from paceline.models.llama import read_layer, read_model

MODEL_TYPES = ("starcoder2",)


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    return unsupported_field(config, ("sliding_window",))


def config_from_hf(config: Any) -> ArchConfig:
    bias = bool(config.use_bias)
    sizes = arch_config(config, qkv_bias=bias, output_bias=bias, eps="norm_epsilon")
    return replace(sizes, norm_kind=NormKind.LAYER, mlp_bias=bias)


def load(checkpoint: ModelCheckpoint, config: ArchConfig) -> DecoderModel:
    """Read a model. Raises WeightsError that names a tensor which is missing, of another shape, or not used."""
    layers = [
        read_layer(checkpoint, config, index, mlp=_mlp(checkpoint, config, f"model.layers.{index}.mlp."))
        for index in range(config.num_layers)
    ]
    return read_model(checkpoint, config, layers)


def _mlp(checkpoint: ModelCheckpoint, config: ArchConfig, prefix: str) -> PlainMlp:
    up, down = f"{prefix}c_fc", f"{prefix}c_proj"
    return PlainMlp(
        checkpoint.linear([up], [config.intermediate_size], config.hidden_size),
        checkpoint.linear([down], [config.hidden_size], config.intermediate_size),
        config.activation,
        checkpoint.tensor(f"{up}.bias", config.intermediate_size) if config.mlp_bias else None,
        checkpoint.tensor(f"{down}.bias", config.hidden_size) if config.mlp_bias else None,
    )
