"""Gemma: Llama with a scaled embedding, norms stored as their distance from one, and GELU in its MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from paceline.models import llama
from paceline.models.checkpoint import ModelCheckpoint
from paceline.models.config import ArchConfig, NormKind, unsupported_field
from paceline.models.decoder import DecoderModel

MODEL_TYPES = ("gemma",)


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    if getattr(config, "use_bidirectional_attention", None):
        return "use_bidirectional_attention is set"
    return unsupported_field(config)


def config_from_hf(config: Any) -> ArchConfig:
    return replace(
        llama.config_from_hf(config),
        norm_kind=NormKind.ZERO_CENTERED,
        embedding_multiplier=config.hidden_size**0.5,
    )


def load(checkpoint: ModelCheckpoint, config: ArchConfig) -> DecoderModel:
    """Read a model. Raises WeightsError that names a tensor which is missing, of another shape, or not used."""
    model = llama.load(checkpoint, config)
    # The multiplier is rounded to the type of the embedding, as it was in training.
    scale = float(torch.tensor(config.embedding_multiplier).to(model.embedding.dtype))
    return replace(model, scale_embedding=lambda rows: rows * scale)
