"""Ministral 3: Mistral whose queries grow with their position, behind a YaRN rope."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.layers.rope import PositionScale, rope_parameters_of
from paceline.models import mistral
from paceline.models.config import ArchConfig
from paceline.models.llama import load

__all__ = ["MODEL_TYPES", "config_from_hf", "load", "unsupported"]

MODEL_TYPES = ("ministral3",)
QUERY_ROPE = 1  # the table of queries; keys have the first


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    parameters = rope_parameters_of(config)
    for name in ("llama_4_scaling_beta", "original_max_position_embeddings"):
        if not isinstance(parameters.get(name), int | float):
            return f"rope_parameters has no {name}"
    return mistral.unsupported(config)


def config_from_hf(config: Any) -> ArchConfig:
    plain, parameters = mistral.config_from_hf(config), rope_parameters_of(config)
    scale = PositionScale(parameters["llama_4_scaling_beta"], int(parameters["original_max_position_embeddings"]))
    kinds = tuple(replace(plain.attention(index), query_rope=QUERY_ROPE) for index in range(plain.num_layers))
    return replace(plain, other_ropes=(replace(plain.rope, scale=scale),), layer_attention=kinds)
