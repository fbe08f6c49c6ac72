"""Phi-1 and Phi-2: attention and MLP read the same layer norm, biases everywhere, a rope over a part of each head."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.layers.decoder_layer import DecoderLayer
from paceline.models.checkpoint import ModelCheckpoint
from paceline.models.config import ArchConfig, NormKind, arch_config, unsupported_field
from paceline.models.decoder import DecoderModel
from paceline.models.llama import LayerNames, read_layer, read_model, read_plain_mlp

MODEL_TYPES = ("phi",)
NAMES = LayerNames(mlp_norm="input_layernorm", output="dense")


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    if config.qk_layernorm:
        return "qk_layernorm is set"
    return unsupported_field(config, ("partial_rotary_factor",))


def config_from_hf(config: Any) -> ArchConfig:
    sizes = arch_config(config, qkv_bias=True, output_bias=True, eps="layer_norm_eps")
    return replace(sizes, norm_kind=NormKind.LAYER, mlp_bias=True, parallel=True, lm_head_bias=True)


def load(checkpoint: ModelCheckpoint, config: ArchConfig) -> DecoderModel:
    """Read a model. Raises WeightsError that names a tensor which is missing, of another shape, or not used."""
    layers = [_layer(checkpoint, config, index) for index in range(config.num_layers)]
    return read_model(checkpoint, config, layers, "model.final_layernorm")


def _layer(checkpoint: ModelCheckpoint, config: ArchConfig, index: int) -> DecoderLayer:
    prefix = f"model.layers.{index}.mlp."
    mlp = read_plain_mlp(checkpoint, config, f"{prefix}fc1", f"{prefix}fc2")
    return read_layer(checkpoint, config, index, NAMES, mlp)
