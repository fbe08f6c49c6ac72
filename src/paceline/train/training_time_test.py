"""Several drafting steps of an EAGLE head at every position of a sequence at once (training-time test).

Step 1 pairs the target's state at t with token t + 1. Step j takes the head's own output of step j - 1 instead, and
the token after that: what the head reads while it drafts. In step j a row attends to all rows of step 1 up to its own,
and of each later step only to its own row, because those rows are the chain that this row has drafted.

`reference` uses the head's own block and one large mask; `unroll` avoids the mask, which is mostly empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from paceline.heads.attention import Attention, JoinedKeys, KeyValues
from paceline.heads.eagle import ChainHead
from paceline.heads.eagle3 import Eagle3Head
from paceline.train.task import shifted


def reference(head: ChainHead, features: Tensor, tokens: Tensor, steps: int) -> Iterator[Tensor]:
    """Hidden states of step 1, 2, …: [batch, length, hidden_size]."""
    rows = torch.arange(tokens.shape[1], device=tokens.device)
    causal, own = rows[:, None] >= rows[None], rows[:, None] == rows[None]
    store, state = JoinedKeys(), head.fuse(features)
    for step in range(1, steps + 1):
        mask = torch.cat([causal] + [own] * (step - 1), dim=1)[None, None]
        state = head.block(head.embed(shifted(tokens, step)), state, (rows + step - 1)[None], mask, store)
        yield state


def unroll(head: Eagle3Head, features: Tensor, tokens: Tensor, steps: int) -> Iterator[Tensor]:
    """The same states as `reference`, faster."""
    rows = torch.arange(tokens.shape[1], device=tokens.device)
    cached: list[KeyValues] = []
    state = head.fuse(features)
    for step in range(1, steps + 1):
        state = _block(head, head.embed(shifted(tokens, step)), state, (rows + step - 1)[None], cached)
        yield state


def _block(head: Eagle3Head, embeddings: Tensor, g: Tensor, positions: Tensor, cached: list[KeyValues]) -> Tensor:
    layer = head.midlayer
    residual = layer.hidden_norm(g) if layer.norm_before_residual else g
    projected = _project(layer.self_attn, layer.beside(embeddings, g), positions)
    cached.append(KeyValues(projected.keys, projected.values))
    mixed = _attend(projected.queries, cached)
    states = residual + layer.self_attn.o_proj(mixed)
    out: Tensor = states + layer.mlp(layer.post_attention_layernorm(states))
    return out


@dataclass(frozen=True, slots=True, eq=False)
class _Projected:
    queries: Tensor  # [batch, num_kv_heads, group, length, head_dim]
    keys: Tensor  # [batch, num_kv_heads, length, head_dim]
    values: Tensor


def _project(attention: Attention, states: Tensor, positions: Tensor) -> _Projected:
    head_dim = attention.settings.head_dim

    def heads(vectors: Tensor) -> Tensor:
        return vectors.view(*vectors.shape[:2], -1, head_dim).transpose(1, 2)

    queries = attention.rotary(heads(attention.q_proj(states)), positions)
    keys = attention.rotary(heads(attention.k_proj(states)), positions)
    batch, _, length, _ = queries.shape
    grouped = queries.reshape(batch, attention.settings.num_kv_heads, -1, length, head_dim)
    return _Projected(grouped, keys, heads(attention.v_proj(states)))


def _attend(queries: Tensor, cached: list[KeyValues]) -> Tensor:
    """Returns [batch, length, num_heads · head_dim]."""
    if len(cached) == 1:
        keys, values = cached[0].keys, cached[0].values
        flat = queries.flatten(1, 2)
        mixed = functional.scaled_dot_product_attention(flat, keys, values, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2)
    return _attend_chain(queries, cached[0], cached[1:]).flatten(1, 2).transpose(1, 2).flatten(2)


def _attend_chain(queries: Tensor, first: KeyValues, chain: list[KeyValues]) -> Tensor:
    """One softmax over the keys of step 1 up to each row and the row's own keys of the later steps."""
    batch, num_kv_heads, group, length, head_dim = queries.shape
    scores = queries.flatten(2, 3) @ first.keys.transpose(-1, -2)
    later = torch.ones(length, length, dtype=torch.bool, device=queries.device).triu(1)
    scores = scores.view(batch, num_kv_heads, group, length, length).masked_fill(later, -torch.inf)
    own = [(queries * step.keys[:, :, None]).sum(dim=-1, keepdim=True) for step in chain]
    weights = (torch.cat([scores, *(part.to(scores.dtype) for part in own)], dim=-1) * head_dim**-0.5).softmax(dim=-1)
    weights = weights.to(first.values.dtype)
    mixed: Tensor = (weights[..., :length].flatten(2, 3) @ first.values).view(queries.shape)
    for number, step in enumerate(chain):
        mixed = mixed + weights[..., length + number, None] * step.values[:, :, None]
    return mixed
