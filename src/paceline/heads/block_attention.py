"""Attention of a block drafter: its rows see each other and a context made of the target's states.

Keys of context and block pass the same products, norm and rotation; a block's own entries last for one pass.
Masks are explicit: drafting shows a row its whole block, training keeps the blocks of many anchors apart.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.heads.attention import KeyStore, KeyValues, Rotary
from paceline.heads.eagle import EagleNorm

SLIDING = "sliding_attention"
FULL = "full_attention"


@dataclass(frozen=True, slots=True, eq=False)
class Angles:
    """Rotary cosines and sines of some positions, each [batch or 1, rows, 1, head_dim / 2]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, rotary: Rotary, positions: Tensor, dtype: torch.dtype) -> Angles:
        """positions [batch or 1, rows]. In float32 for any dtype: half precision cannot hold neighbouring positions."""
        angles = positions[..., None, None].float() * rotary.frequencies.float()
        return cls((rotary.magnitude * angles.cos()).to(dtype), (rotary.magnitude * angles.sin()).to(dtype))

    def rotated(self, vectors: Tensor) -> Tensor:
        """vectors [batch, rows, heads, head_dim]"""
        low, high = vectors.chunk(2, dim=-1)
        return torch.cat([low * self.cos - high * self.sin, high * self.cos + low * self.sin], dim=-1)


@dataclass(frozen=True, slots=True)
class BlockAttentionSettings:
    """Sizes of the attention of one layer. sinks: each query head has a score that takes weight and gives no value."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    bias: bool = False
    sinks: bool = False


class BlockAttention(nn.Module):
    """Grouped-query attention with a norm for every head of queries and keys."""

    def __init__(self, settings: BlockAttentionSettings) -> None:
        super().__init__()
        self.settings = settings
        size, head_dim, bias = settings.hidden_size, settings.head_dim, settings.bias
        q_size, kv_size = settings.num_heads * head_dim, settings.num_kv_heads * head_dim
        self.q_proj = nn.Linear(size, q_size, bias=bias)
        self.k_proj = nn.Linear(size, kv_size, bias=bias)
        self.v_proj = nn.Linear(size, kv_size, bias=bias)
        self.o_proj = nn.Linear(q_size, size, bias=bias)
        self.q_norm = EagleNorm(head_dim, eps=settings.rms_norm_eps)
        self.k_norm = EagleNorm(head_dim, eps=settings.rms_norm_eps)
        self.attention_sink_bias = nn.Parameter(torch.zeros(settings.num_heads)) if settings.sinks else None

    def forward(self, states: Tensor, angles: Angles, mask: Tensor | None, store: KeyStore) -> Tensor:
        """states [batch, rows, hidden_size]; mask bool, broadcast to [batch, 1, rows, columns], True: attended."""
        batch, rows, _ = states.shape
        queries = angles.rotated(self.q_norm(self._split(self.q_proj(states)))).transpose(1, 2)
        entries = store.extend(self.entries(states, angles))
        mixed = self._attend(queries, entries, mask)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, rows, -1))
        return output

    def entries(self, vectors: Tensor, angles: Angles) -> KeyValues:
        """Keys and values of input vectors [batch, rows, hidden_size]."""
        keys = angles.rotated(self.k_norm(self._split(self.k_proj(vectors))))
        return KeyValues(keys.transpose(1, 2), self._split(self.v_proj(vectors)).transpose(1, 2))

    def _split(self, vectors: Tensor) -> Tensor:
        return vectors.view(*vectors.shape[:-1], -1, self.settings.head_dim)

    def _attend(self, queries: Tensor, entries: KeyValues, mask: Tensor | None) -> Tensor:
        """Queries that share a key head are folded into its rows, so that keys and values are never copied."""
        batch, heads, rows, size = queries.shape
        group = heads // self.settings.num_kv_heads
        folded = queries.reshape(batch, self.settings.num_kv_heads, group * rows, size)
        if mask is not None and mask.shape[2] > 1:
            mask = mask.repeat(1, 1, group, 1)
        if self.attention_sink_bias is None:
            mixed = functional.scaled_dot_product_attention(folded, entries.keys, entries.values, attn_mask=mask)
        else:
            sinks = self.attention_sink_bias.view(1, -1, group, 1).expand(batch, -1, -1, rows).reshape(folded.shape[:3])
            mixed = _with_sinks(folded, entries, mask, sinks)
        return mixed.reshape(batch, heads, rows, size)


def _with_sinks(queries: Tensor, entries: KeyValues, mask: Tensor | None, sinks: Tensor) -> Tensor:
    """Attention whose weights share their sum with one sink score a row. sinks [batch, num_kv_heads, rows]"""
    scores = queries @ entries.keys.transpose(-1, -2) * queries.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    joined = torch.cat([scores, sinks[..., None].to(scores.dtype)], dim=-1)
    return torch.softmax(joined.float(), dim=-1)[..., :-1].to(queries.dtype) @ entries.values


@dataclass(frozen=True, slots=True)
class Visibility:
    """Which columns a layer can see at all. causal: none after the row's own; window: none this far away, 0: any."""

    causal: bool = False
    window: int = 0

    def narrowed(self, mask: Tensor | None, rows: Tensor, columns: Tensor) -> Tensor | None:
        """The mask without what the layer cannot see. rows, columns: positions, int64 [batch or 1, ...].

        Returns bool, broadcast to [batch, 1, rows, columns]; None stays None where the layer sees all.
        """
        distance = rows[:, None, :, None] - columns[:, None, None, :]
        if self.causal:
            mask = _both(mask, distance >= 0)
        if self.window:
            mask = _both(mask, distance.abs() < self.window)
        return mask


def _both(one: Tensor | None, other: Tensor) -> Tensor:
    return other if one is None else one & other
