"""The attention block of an EAGLE head: grouped queries, rotary positions, an explicit mask.

Masks are explicit because the two callers need different ones: a node of a draft tree sees its ancestors; in training
a row sees the whole sequence in the first unrolled step and only itself in the later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.layers.rope import rotary_frequencies


@dataclass(frozen=True, slots=True, eq=False)
class KeyValues:
    """Keys and values of attention, each [batch, num_kv_heads, columns, head_dim]."""

    keys: Tensor
    values: Tensor


class KeyStore(Protocol):
    """Stores the keys and values of a block and returns those of earlier passes with them."""

    def extend(self, new: KeyValues) -> KeyValues:
        """Store the entries of this pass; returns all entries the mask's columns refer to, in their order."""

    def part(self, heads: slice) -> KeyStore:
        """A store for some of the heads: those of one layer, where a head has several."""


class JoinedKeys:
    """Appends the entries of every pass. Keeps gradients, so training can unroll over it."""

    def __init__(self) -> None:
        self.entries: KeyValues | None = None
        self._parts: dict[int, JoinedKeys] = {}

    def part(self, heads: slice) -> JoinedKeys:
        return self._parts.setdefault(heads.start, JoinedKeys())

    def extend(self, new: KeyValues) -> KeyValues:
        if self.entries is None:
            self.entries = new
        else:
            keys = torch.cat([self.entries.keys, new.keys], dim=2)
            self.entries = KeyValues(keys, torch.cat([self.entries.values, new.values], dim=2))
        return self.entries


@dataclass(frozen=True, slots=True)
class RotarySettings:
    """Rotary position embedding. scaling: the `rope_scaling` of a Hugging Face config, or None."""

    head_dim: int
    theta: float = 10000.0
    max_seq_len: int = 2048
    scaling: Mapping[str, Any] | None = None


class ExactTables(nn.Module):
    """A module whose tables keep their dtype when a head is moved to half precision, which cannot tell far positions
    apart: a frequency with an error of 0.2% is a radian off after 500 tokens."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(lambda table: table.to(fn(table[:0]).device), recurse)
        return self


class Rotary(ExactTables):
    """Rotary position embedding."""

    frequencies: Tensor

    def __init__(self, settings: RotarySettings) -> None:
        super().__init__()
        self.magnitude = 1.0
        if settings.scaling is None:
            frequencies = rotary_frequencies(settings.head_dim, settings.theta)
        else:
            frequencies, self.magnitude = _scaled_frequencies(settings)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, vectors: Tensor, positions: Tensor) -> Tensor:
        """vectors [batch, heads, rows, head_dim], positions [batch or 1, rows]."""
        # Angles are float32 for any dtype of the weights: half precision cannot represent neighbouring positions.
        angles = positions[:, None, :, None].float() * self.frequencies.float()
        cos, sin = (self.magnitude * angles.cos()).to(vectors.dtype), (self.magnitude * angles.sin()).to(vectors.dtype)
        low, high = vectors.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)


def _scaled_frequencies(settings: RotarySettings) -> tuple[Tensor, float]:
    """Long-context variants as transformers defines them: the frequencies and the magnitude of cos and sin."""
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
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False


class Attention(nn.Module):
    """Grouped-query attention whose input may be larger than its output (EAGLE-3 reads two vectors at once)."""

    def __init__(self, settings: AttentionSettings, rotary: RotarySettings) -> None:
        super().__init__()
        self.settings = settings
        q_size, kv_size = settings.num_heads * settings.head_dim, settings.num_kv_heads * settings.head_dim
        self.q_proj = nn.Linear(settings.input_size, q_size, bias=settings.qkv_bias)
        self.k_proj = nn.Linear(settings.input_size, kv_size, bias=settings.qkv_bias)
        self.v_proj = nn.Linear(settings.input_size, kv_size, bias=settings.qkv_bias)
        self.o_proj = nn.Linear(q_size, settings.output_size, bias=settings.output_bias)
        self.rotary = Rotary(rotary)

    def forward(self, states: Tensor, positions: Tensor, mask: Tensor | None, store: KeyStore | None) -> Tensor:
        """states [batch, rows, input_size]; mask bool, broadcast to [batch, 1, rows, columns], True: attended."""
        batch, rows, _ = states.shape
        queries = self.rotary(self._split(self.q_proj(states), self.settings.num_heads), positions)
        keys = self.rotary(self._split(self.k_proj(states), self.settings.num_kv_heads), positions)
        new = KeyValues(keys, self._split(self.v_proj(states), self.settings.num_kv_heads))
        mixed = self._attend(queries, new if store is None else store.extend(new), mask)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, rows, -1))
        return output

    def _split(self, vectors: Tensor, heads: int) -> Tensor:
        return vectors.view(*vectors.shape[:-1], heads, self.settings.head_dim).transpose(1, 2)

    def _attend(self, queries: Tensor, entries: KeyValues, mask: Tensor | None) -> Tensor:
        """Queries that share a key head are folded into its rows, so that keys and values are never copied."""
        batch, heads, rows, size = queries.shape
        group = heads // self.settings.num_kv_heads
        folded = queries.reshape(batch, self.settings.num_kv_heads, group * rows, size)
        if mask is not None and mask.shape[2] > 1:
            mask = mask.repeat(1, 1, group, 1)
        mixed = functional.scaled_dot_product_attention(folded, entries.keys, entries.values, attn_mask=mask)
        return mixed.reshape(batch, heads, rows, size)


def causal_mask(rows: int, before: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """bool [1, 1, rows, before + rows]: every row attends to the columns before, to itself and to the rows above it."""
    last = torch.arange(rows, device=device)[:, None] + before
    return (torch.arange(before + rows, device=device)[None] <= last)[None, None]
