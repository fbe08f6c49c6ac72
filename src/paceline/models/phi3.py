"""Phi-3 and Phi-4: Llama whose q, k and v are stored as one tensor, and gate and up as another.

A longrope changes its factors with the length of a sequence; checkpoints that have one run through transformers.
"""

from __future__ import annotations

from typing import Any

from paceline.models.checkpoint import ModelCheckpoint
from paceline.models.config import ArchConfig, arch_config, mixed_windows, unsupported_field
from paceline.models.decoder import DecoderModel
from paceline.models.llama import LayerNames, read_layer, read_model

MODEL_TYPES = ("phi3",)
NAMES = LayerNames(qkv=("qkv_proj",), gate_up=("gate_up_proj",))


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    return mixed_windows(config) or unsupported_field(config, ("partial_rotary_factor", "sliding_window"))


def config_from_hf(config: Any) -> ArchConfig:
    return arch_config(config)


def load(checkpoint: ModelCheckpoint, config: ArchConfig) -> DecoderModel:
    """Read a model. Raises WeightsError that names a tensor which is missing, of another shape, or not used."""
    layers = [read_layer(checkpoint, config, index, NAMES) for index in range(config.num_layers)]
    return read_model(checkpoint, config, layers)
