"""Ministral: Mistral whose layers say each for itself whether they have a sliding window."""

from __future__ import annotations

from typing import Any

from paceline.models.config import unsupported_field
from paceline.models.llama import load
from paceline.models.mistral import config_from_hf

__all__ = ["MODEL_TYPES", "config_from_hf", "load", "unsupported"]

MODEL_TYPES = ("ministral",)


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    return unsupported_field(config, ("sliding_window",))
