"""VaultGemma: Gemma 2 without the norms after attention and MLP."""

from __future__ import annotations

from paceline.models.checkpoint import ModelCheckpoint
from paceline.models.config import ArchConfig
from paceline.models.decoder import DecoderModel
from paceline.models.gemma2 import config_from_hf, load_gemma, unsupported
from paceline.models.llama import LayerNames

__all__ = ["MODEL_TYPES", "config_from_hf", "load", "unsupported"]

MODEL_TYPES = ("vaultgemma",)
NAMES = LayerNames(mlp_norm="pre_feedforward_layernorm")


def load(checkpoint: ModelCheckpoint, config: ArchConfig) -> DecoderModel:
    """Read a model. Raises WeightsError that names a tensor which is missing, of another shape, or not used."""
    return load_gemma(checkpoint, config, NAMES)
