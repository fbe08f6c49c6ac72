"""Rotary position embedding. The Triton form is part of the attention kernel (layers/attention_kernels.py).

Every kernel rotates value i of a head with value i + head_dim / 2. Architectures that rotate other pairs, or only part
of a head, have the values of their queries and keys put into that order when weights are loaded: scores stay the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # frequencies that do not depend on the sequence's length


@dataclass(frozen=True, slots=True)
class PositionScale:
    """A factor that grows with the position: 1 + beta · log(1 + floor(position / period))."""

    beta: float
    period: int

    def __call__(self, positions: Tensor) -> Tensor:
        return 1 + self.beta * torch.log(1 + torch.floor(positions / self.period))


@dataclass(frozen=True, slots=True, eq=False)
class RopeConfig:
    """How positions rotate queries and keys.

    order  which stored value of a head comes where, int64 [head_dim]; None: as it is stored
    scale  what rotated vectors are multiplied with, by position; None: nothing
    """

    frequencies: Tensor  # float32 [head_dim / 2]; 0: this pair is not rotated
    attention_scaling: float = 1.0
    order: Tensor | None = None
    scale: PositionScale | None = None


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


def partial_rotary_factor(config: Any) -> float:
    """The part of a head that a Hugging Face config rotates."""
    parameters = rope_parameters_of(config)
    factor = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None)
    return float(factor or 1.0)


def scaled_length(config: Any) -> int:
    """Tokens that yarn stretches a model to; 0: it does not. Model cards add yarn and leave max_position_embeddings."""
    parameters = rope_parameters_of(config)
    if parameters.get("rope_type") != "yarn":
        return 0
    factor, original = parameters.get("factor"), parameters.get("original_max_position_embeddings")
    return int(factor * original) if factor and original else 0


def rope_config_of(config: Any, head_dim: int, *, interleaved: bool = False) -> RopeConfig:
    """The rope of a Hugging Face config whose rope type is one of FIXED_ROPE_TYPES.

    interleaved: pairs lie side by side, value 2 · i with value 2 · i + 1
    """
    parameters = rope_parameters_of(config)
    if parameters.get("rope_type") == "default":
        rotated = int(head_dim * partial_rotary_factor(config))
        return arranged(rotary_frequencies(rotated, float(parameters["rope_theta"])), head_dim, interleaved=interleaved)
    # transformers defines the scaled variants; its models take a second to import, so only where one is needed.
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(config)
    return arranged(rotary.inv_freq.float(), head_dim, float(rotary.attention_scaling), interleaved=interleaved)


def arranged(frequencies: Tensor, head_dim: int, scaling: float = 1.0, *, interleaved: bool = False) -> RopeConfig:
    """A rope of the first 2 · len(frequencies) values of a head; the others are not rotated."""
    order = head_order(head_dim, 2 * frequencies.shape[0], interleaved)
    still = torch.zeros(head_dim // 2 - frequencies.shape[0])
    identical = order == list(range(head_dim))
    return RopeConfig(torch.cat([frequencies, still]), scaling, None if identical else torch.tensor(order))


def head_order(head_dim: int, rotated: int, interleaved: bool) -> list[int]:
    """The stored values of a head in the order that makes pairs of value i and value i + head_dim / 2."""
    pairs, others = range(rotated), range(rotated, head_dim)
    first = list(pairs[::2] if interleaved else pairs[: rotated // 2])
    second = list(pairs[1::2] if interleaved else pairs[rotated // 2 :])
    half = len(others) // 2
    return [*first, *others[:half], *second, *others[half:]]


def in_order(rows: Tensor, order: Tensor | None) -> Tensor:
    """Rows of whole heads [heads · head_dim, …], each head in this order."""
    if order is None:
        return rows
    heads = rows.reshape(-1, order.shape[0], *rows.shape[1:])
    return heads[:, order.to(rows.device)].flatten(0, 1)


def rope_cache(rope: RopeConfig, length: int, device: torch.device) -> Tensor:
    """Cosines and sines of every position: float32 [length, 2, head_dim / 2]."""
    positions = torch.arange(length, dtype=torch.float32)
    angles = positions[:, None] * rope.frequencies[None]
    scale = torch.where(rope.frequencies == 0, 1.0, rope.attention_scaling)
    if rope.scale is not None:
        scale = scale * rope.scale(positions)[:, None]
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
