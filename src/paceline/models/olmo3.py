"""OLMo 3: OLMo 2 with windows in three layers of four, which have a rope of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.layers.attention import LayerAttention
from paceline.layers.rope import rope_config_of
from paceline.models import llama
from paceline.models.config import ArchConfig, layer_windows, unsupported_field
from paceline.models.gemma3 import FULL, SLIDING, OneRope
from paceline.models.olmo2 import load

__all__ = ["MODEL_TYPES", "config_from_hf", "load", "unsupported"]

MODEL_TYPES = ("olmo3",)


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    reasons = (unsupported_field(OneRope(config, kind), ("sliding_window",)) for kind in (FULL, SLIDING))
    return next((reason for reason in reasons if reason is not None), None)


def config_from_hf(config: Any) -> ArchConfig:
    full, sliding = (OneRope(config, kind) for kind in (FULL, SLIDING))
    sizes, windows = llama.config_from_hf(full), zip(full.layer_types, layer_windows(full))
    kinds = [LayerAttention(window=window, rope=int(kind == SLIDING)) for kind, window in windows]
    ropes = (rope_config_of(sliding, sizes.head_dim),)
    return replace(sizes, layer_attention=tuple(kinds), other_ropes=ropes)
