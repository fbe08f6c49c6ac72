"""Command R: attention and MLP read the same layer norm, a rope whose pairs lie side by side, scaled logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.models.checkpoint import ModelCheckpoint
from paceline.models.config import ArchConfig, NormKind, arch_config, unsupported_field
from paceline.models.decoder import DecoderModel
from paceline.models.llama import LayerNames, read_layer, read_model

MODEL_TYPES = ("cohere",)
NAMES = LayerNames(mlp_norm="input_layernorm")


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    if getattr(config, "use_qk_norm", False):
        return "use_qk_norm is set"
    return unsupported_field(config, ("logit_scale", "rope_interleaved"))


def config_from_hf(config: Any) -> ArchConfig:
    bias = bool(config.attention_bias)
    sizes = arch_config(config, qkv_bias=bias, output_bias=bias, interleaved_rope=True, eps="layer_norm_eps")
    scale = float(config.logit_scale)
    return replace(sizes, norm_kind=NormKind.LAYER, parallel=True, logits_multiplier=scale)


def load(checkpoint: ModelCheckpoint, config: ArchConfig) -> DecoderModel:
    """Read a model. Raises WeightsError that names a tensor which is missing, of another shape, or not used."""
    layers = [read_layer(checkpoint, config, index, NAMES) for index in range(config.num_layers)]
    return read_model(checkpoint, config, layers)
