"""EXAONE 4: norms after attention and after the MLP, norms of queries and keys, and beside windows layers without a
rope."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.layers.attention import LayerAttention
from paceline.models import olmo2
from paceline.models.checkpoint import ModelCheckpoint
from paceline.models.config import ArchConfig, arch_config, layer_windows, unsupported_field
from paceline.models.decoder import DecoderModel
from paceline.models.llama import read_layer, read_model

MODEL_TYPES = ("exaone4",)


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    return unsupported_field(config, ("sliding_window",))


def config_from_hf(config: Any) -> ArchConfig:
    sizes, everywhere = arch_config(config, qk_norm=True), config.sliding_window is None
    windows = layer_windows(config)
    kinds = [LayerAttention(window=window, rope=0 if everywhere or window else None) for window in windows]
    return replace(sizes, layer_attention=tuple(kinds))


def load(checkpoint: ModelCheckpoint, config: ArchConfig) -> DecoderModel:
    """Read a model. Raises WeightsError that names a tensor which is missing, of another shape, or not used."""
    layers = [read_layer(checkpoint, config, index, olmo2.NAMES) for index in range(config.num_layers)]
    return read_model(checkpoint, config, layers)
