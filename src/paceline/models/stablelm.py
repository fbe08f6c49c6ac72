"""StableLM: Llama with layer norms and a rope over a part of each head; in some checkpoints attention and MLP read the
same norm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.models.checkpoint import ModelCheckpoint
from paceline.models.config import ArchConfig, NormKind, arch_config, unsupported_field
from paceline.models.decoder import DecoderModel
from paceline.models.llama import LLAMA_NAMES, LayerNames, read_layer, read_model

MODEL_TYPES = ("stablelm",)
PARALLEL_NAMES = LayerNames(mlp_norm="input_layernorm")


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    if config.qk_layernorm:
        return "qk_layernorm is set"
    return unsupported_field(config, ("partial_rotary_factor",))


def config_from_hf(config: Any) -> ArchConfig:
    sizes = arch_config(config, qkv_bias=bool(config.use_qkv_bias), eps="layer_norm_eps")
    return replace(sizes, norm_kind=NormKind.LAYER, parallel=bool(config.use_parallel_residual))


def load(checkpoint: ModelCheckpoint, config: ArchConfig) -> DecoderModel:
    """Read a model. Raises WeightsError that names a tensor which is missing, of another shape, or not used."""
    names = PARALLEL_NAMES if config.parallel else LLAMA_NAMES
    layers = [read_layer(checkpoint, config, index, names) for index in range(config.num_layers)]
    return read_model(checkpoint, config, layers)
