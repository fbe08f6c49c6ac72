"""The attention block of an EAGLE head: grouped queries, rotary positions, an explicit mask.

Masks are explicit because two callers look at the past in two ways: a draft tree sees its ancestors, and training
unrolls several steps in which a row sees the sequence by step one and only itself by the later ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.layers.rope import rotary_frequencies


@dataclass(frozen=True, slots=True, eq=False)
class KeyValues:
    """All the keys and values a pass may look at, [batch, kv heads, seen, head size]."""

    keys: Tensor
    values: Tensor


class KeyStore(Protocol):
    """Where a block's keys and values go, and where those of earlier passes come from."""

    def extend(self, fresh: KeyValues) -> KeyValues:
        """Take the entries of this pass; returns everything the mask's columns stand for, in their order."""


class JoinedKeys:
    """Appends every pass behind the ones before. Keeps gradients, so training can unroll over it."""

    def __init__(self) -> None:
        self.held: KeyValues | None = None

    def extend(self, fresh: KeyValues) -> KeyValues:
        if self.held is None:
            self.held = fresh
        else:
            keys = torch.cat([self.held.keys, fresh.keys], dim=2)
            self.held = KeyValues(keys, torch.cat([self.held.values, fresh.values], dim=2))
        return self.held


@dataclass(frozen=True, slots=True)
class RotarySettings:
    """How positions turn queries and keys. scaling: Hugging Face's `rope_scaling`, or None for the plain kind."""

    head_dim: int
    theta: float = 10000.0
    max_seq_len: int = 2048
    scaling: Mapping[str, Any] | None = None


class Rotary(nn.Module):
    """Rotary position embedding."""

    frequencies: Tensor

    def __init__(self, settings: RotarySettings) -> None:
        super().__init__()
        found = rotary_frequencies(settings.head_dim, settings.theta) if settings.scaling is None else None
        self.magnitude = 1.0
        if found is None:
            found, self.magnitude = _scaled_frequencies(settings)
        self.register_buffer("frequencies", found, persistent=False)

    def forward(self, vectors: Tensor, positions: Tensor) -> Tensor:
        """vectors [batch, heads, width, head size], positions [batch or 1, width]."""
        # Angles in float32 whatever the weights are: half precision cannot tell neighbouring positions apart.
        angles = positions[:, None, :, None].float() * self.frequencies.float()
        cos, sin = (self.magnitude * angles.cos()).to(vectors.dtype), (self.magnitude * angles.sin()).to(vectors.dtype)
        low, high = vectors.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def _scaled_frequencies(settings: RotarySettings) -> tuple[Tensor, float]:
    """Long-context variants, by the definition of transformers. Returns frequencies and the magnitude they need."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = dict(settings.scaling or {})
    parameters.setdefault("rope_theta", settings.theta)
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    config = LlamaConfig(
        head_dim=settings.head_dim, max_position_embeddings=settings.max_seq_len, rope_parameters=parameters
    )
    rotary = LlamaRotaryEmbedding(config)
    return rotary.inv_freq.float(), float(rotary.attention_scaling)


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """Sizes of one attention block."""

    input_size: int
    output_size: int
    heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False


class Attention(nn.Module):
    """Grouped-query attention whose input may be wider than its output (EAGLE-3 reads two vectors at once)."""

    def __init__(self, settings: AttentionSettings, rotary: RotarySettings) -> None:
        super().__init__()
        self.settings = settings
        width, kv_width = settings.heads * settings.head_dim, settings.num_kv_heads * settings.head_dim
        self.q_proj = nn.Linear(settings.input_size, width, bias=settings.qkv_bias)
        self.k_proj = nn.Linear(settings.input_size, kv_width, bias=settings.qkv_bias)
        self.v_proj = nn.Linear(settings.input_size, kv_width, bias=settings.qkv_bias)
        self.o_proj = nn.Linear(width, settings.output_size, bias=settings.output_bias)
        self.rotary = Rotary(rotary)

    def forward(self, states: Tensor, positions: Tensor, mask: Tensor | None, store: KeyStore | None) -> Tensor:
        """states [batch, width, input]; mask bool, broadcast to [batch, 1, width, seen], True where one may look."""
        batch, width, _ = states.shape
        queries = self.rotary(self._split(self.q_proj(states), self.settings.heads), positions)
        keys = self.rotary(self._split(self.k_proj(states), self.settings.num_kv_heads), positions)
        fresh = KeyValues(keys, self._split(self.v_proj(states), self.settings.num_kv_heads))
        seen = fresh if store is None else store.extend(fresh)
        mixed = self._attend(queries, seen, mask)
        joined: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, width, -1))
        return joined

    def _split(self, vectors: Tensor, heads: int) -> Tensor:
        return vectors.view(*vectors.shape[:-1], heads, self.settings.head_dim).transpose(1, 2)

    def _attend(self, queries: Tensor, seen: KeyValues, mask: Tensor | None) -> Tensor:
        """Queries that share a key head are laid behind one another, so that keys and values are never copied."""
        batch, heads, width, size = queries.shape
        group = heads // self.settings.num_kv_heads
        folded = queries.reshape(batch, self.settings.num_kv_heads, group * width, size)
        if mask is not None and mask.shape[2] > 1:
            mask = mask.repeat(1, 1, group, 1)
        mixed = functional.scaled_dot_product_attention(folded, seen.keys, seen.values, attn_mask=mask)
        return mixed.reshape(batch, heads, width, size)


def causal_mask(width: int, before: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """bool [1, 1, width, before + width]: every row sees all that was there before, itself and the rows above it."""
    rows = torch.arange(width, device=device)[:, None] + before
    return (torch.arange(before + width, device=device)[None] <= rows)[None, None]
