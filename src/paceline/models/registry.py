"""Architectures by model type. An architecture is one module; registering it here is all it takes to run it.

An architecture module has:
  unsupported(config) -> str | None      why a model with this Hugging Face config cannot run here; None: it can
  config_from_hf(config) -> ArchConfig   its sizes
  load(checkpoint, config) -> DecoderModel   its weights, wired
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # the list of architectures must not load torch
    from paceline.models.checkpoint import ModelCheckpoint
    from paceline.models.config import ArchConfig
    from paceline.models.decoder import DecoderModel


class ArchitectureModule(Protocol):
    """A module of this room."""

    def unsupported(self, config: Any) -> str | None:
        """Why a model with this config cannot run here; None: it can."""

    def config_from_hf(self, config: Any) -> ArchConfig:
        """The sizes of a model."""

    def load(self, checkpoint: ModelCheckpoint, config: ArchConfig) -> DecoderModel:
        """Read a model."""


_architectures: dict[str, str | ArchitectureModule] = {
    "gemma2": "paceline.models.gemma2",
    "gemma3": "paceline.models.gemma3",
    "gemma3_text": "paceline.models.gemma3",
    "llama": "paceline.models.llama",
    "mistral": "paceline.models.mistral",
    "qwen2": "paceline.models.qwen2",
    "qwen3": "paceline.models.qwen3",
    "qwen3_5": "paceline.models.qwen3_5",
    "qwen3_5_text": "paceline.models.qwen3_5",
    "qwen3_5_moe": "paceline.models.qwen3_5_moe",
    "qwen3_5_moe_text": "paceline.models.qwen3_5_moe",
    "qwen3_next": "paceline.models.qwen3_next",
    "arcee": "paceline.models.arcee",
    "cohere": "paceline.models.cohere",
    "cohere2": "paceline.models.cohere2",
    "ernie4_5": "paceline.models.ernie4_5",
    "exaone4": "paceline.models.exaone4",
    "gemma": "paceline.models.gemma",
    "vaultgemma": "paceline.models.vaultgemma",
    "gpt_oss": "paceline.models.gpt_oss",
    "granitemoe": "paceline.models.granitemoe",
    "mixtral": "paceline.models.mixtral",
    "olmoe": "paceline.models.olmoe",
    "qwen2_moe": "paceline.models.qwen2_moe",
    "qwen3_moe": "paceline.models.qwen3_moe",
    "glm": "paceline.models.glm",
    "glm4": "paceline.models.glm4",
    "gpt_neox": "paceline.models.gpt_neox",
    "granite": "paceline.models.granite",
    "ministral": "paceline.models.ministral",
    "ministral3": "paceline.models.ministral3",
    "olmo2": "paceline.models.olmo2",
    "olmo3": "paceline.models.olmo3",
    "phi": "paceline.models.phi",
    "phi3": "paceline.models.phi3",
    "seed_oss": "paceline.models.seed_oss",
    "smollm3": "paceline.models.smollm3",
    "stablelm": "paceline.models.stablelm",
    "starcoder2": "paceline.models.starcoder2",
}


def register(model_type: str, architecture: str | ArchitectureModule) -> None:
    """Add an architecture: a module, or the name of one, imported when a model of the type is loaded."""
    _architectures[model_type] = architecture


def unregister(model_type: str) -> None:
    """Remove an architecture that `register` added."""
    _architectures.pop(model_type, None)


def model_types() -> tuple[str, ...]:
    """Every model type that runs natively."""
    return tuple(_architectures)


def get(model_type: str) -> ArchitectureModule | None:
    """The architecture of a model type; None: there is none."""
    architecture = _architectures.get(model_type)
    if isinstance(architecture, str):
        module: Any = import_module(architecture)
        architecture = _architectures[model_type] = module
    return architecture


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config does not run natively; None: it does."""
    model_type = getattr(config, "model_type", None)
    architecture = get(model_type) if model_type else None
    if architecture is None:
        return f"no architecture is registered for model type {model_type!r}"
    return architecture.unsupported(config)
