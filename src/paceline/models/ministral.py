"""Ministral: Mistral whose layers say each for itself whether they have a sliding window."""

from __future__ import annotations

from paceline.models.mistral import config_from_hf, load, unsupported

__all__ = ["MODEL_TYPES", "config_from_hf", "load", "unsupported"]

MODEL_TYPES = ("ministral",)
