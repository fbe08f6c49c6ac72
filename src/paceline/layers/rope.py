"""Rotary position embedding. The Triton form is part of the attention kernel (layers/attention_kernels.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # frequencies that do not depend on the sequence's length


@dataclass(frozen=True, slots=True, eq=False)
class RopeConfig:
    """How positions rotate queries and keys."""

    frequencies: Tensor  # float32 [head_dim / 2]
    attention_scaling: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class CosSin:
    """Cosines and sines of the nodes of a pass, laid out for `rotate`."""

    cos: Tensor  # [nodes, 1, head_dim]
    sin: Tensor  # the lower half negated


def rotary_frequencies(head_dim: int, theta: float) -> Tensor:
    """How fast each pair of values rotates with the position: float32 [head_dim / 2]."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (theta**steps)


def rope_parameters_of(config: Any) -> Mapping[str, Any]:
    """The rope settings of a Hugging Face config; empty where it has none."""
    return getattr(config, "rope_parameters", None) or {}


def rope_config_of(config: Any, head_dim: int) -> RopeConfig:
    """Frequencies for a Hugging Face config whose rope type is one of FIXED_ROPE_TYPES."""
    parameters = rope_parameters_of(config)
    if parameters.get("rope_type") == "default":
        return RopeConfig(rotary_frequencies(head_dim, float(parameters["rope_theta"])))
    # transformers defines the scaled variants; its models take a second to import, so only where one is needed.
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(config)
    return RopeConfig(rotary.inv_freq.float(), float(rotary.attention_scaling))


def rope_cache(rope: RopeConfig, length: int, device: torch.device) -> Tensor:
    """Cosines and sines of every position: float32 [length, 2, head_dim / 2]."""
    angles = torch.arange(length, dtype=torch.float32)[:, None] * rope.frequencies[None]
    scale = rope.attention_scaling
    return torch.stack([angles.cos() * scale, angles.sin() * scale], dim=1).to(device)


def cos_sin(cache: Tensor, positions: Tensor | slice, dtype: torch.dtype) -> CosSin:
    """The rows of a rope cache for these positions."""
    rows = cache[positions].to(dtype)[:, None]
    cos, sin = rows[:, :, 0], rows[:, :, 1]
    return CosSin(torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1))


def rotate(heads: Tensor, rotation: CosSin) -> Tensor:
    """Vectors of heads [nodes, heads, head_dim], rotated by the position of their node."""
    half = heads.shape[-1] // 2
    return torch.addcmul(heads * rotation.cos, heads.roll(half, dims=-1), rotation.sin)
