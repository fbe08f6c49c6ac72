"""Several drafting steps of an EAGLE head at every place of a text at once.

Step 1 pairs the target's true state at t with token t + 1. Step j takes the head's own output of step j - 1 instead,
and the token after that: what the head meets while it drafts. In step j a row sees, of step 1, all rows up to its own;
of each later step only its own row, because those rows are the chain that this very row has drafted.

`reference` says it with the head's own block and one big mask, `unroll` without a mask that is mostly empty.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from paceline.heads.attention import Attention, JoinedKeys, KeyValues
from paceline.heads.eagle3 import Eagle3Head
from paceline.train.task import ahead


def reference(head: Eagle3Head, features: Tensor, tokens: Tensor, steps: int) -> Iterator[Tensor]:
    """ModelOutput of step 1, 2, …: [batch, width, hidden]."""
    width = tokens.shape[1]
    rows = torch.arange(width, device=tokens.device)
    causal, own = rows[:, None] >= rows[None], rows[:, None] == rows[None]
    store, state = JoinedKeys(), head.fuse(features)
    for step in range(1, steps + 1):
        mask = torch.cat([causal] + [own] * (step - 1), dim=1)[None, None]
        state = head.block(head.embed(ahead(tokens, step)), state, (rows + step - 1)[None], mask, store)
        yield state


def unroll(head: Eagle3Head, features: Tensor, tokens: Tensor, steps: int) -> Iterator[Tensor]:
    """The same outputs as `reference`, faster."""
    rows = torch.arange(tokens.shape[1], device=tokens.device)
    seen: list[KeyValues] = []
    state = head.fuse(features)
    for step in range(1, steps + 1):
        state = _block(head, head.embed(ahead(tokens, step)), state, (rows + step - 1)[None], seen)
        yield state


def _block(head: Eagle3Head, embeddings: Tensor, g: Tensor, positions: Tensor, seen: list[KeyValues]) -> Tensor:
    layer = head.midlayer
    residual = layer.hidden_norm(g) if layer.norm_before_residual else g
    projected = _project(layer.self_attn, layer.beside(embeddings, g), positions)
    seen.append(KeyValues(projected.keys, projected.values))
    mixed = _attend(projected.queries, seen)
    states = residual + layer.self_attn.o_proj(mixed)
    out: Tensor = states + layer.mlp(layer.post_attention_layernorm(states))
    return out


@dataclass(frozen=True, slots=True, eq=False)
class _Projected:
    queries: Tensor  # [batch, kv heads, group, width, size]
    keys: Tensor  # [batch, kv heads, width, size]
    values: Tensor


def _project(attention: Attention, states: Tensor, positions: Tensor) -> _Projected:
    size = attention.settings.head_dim

    def heads(vectors: Tensor) -> Tensor:
        return vectors.view(*vectors.shape[:2], -1, size).transpose(1, 2)

    queries = attention.rotary(heads(attention.q_proj(states)), positions)
    keys = attention.rotary(heads(attention.k_proj(states)), positions)
    batch, _, width, _ = queries.shape
    grouped = queries.reshape(batch, attention.settings.num_kv_heads, -1, width, size)
    return _Projected(grouped, keys, heads(attention.v_proj(states)))


def _attend(queries: Tensor, seen: list[KeyValues]) -> Tensor:
    """Returns [batch, width, heads · size]."""
    if len(seen) == 1:
        text = seen[0]
        flat = queries.flatten(1, 2)
        mixed = functional.scaled_dot_product_attention(flat, text.keys, text.values, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2)
    return _attend_chain(queries, seen[0], seen[1:]).flatten(1, 2).transpose(1, 2).flatten(2)


def _attend_chain(queries: Tensor, text: KeyValues, chain: list[KeyValues]) -> Tensor:
    """One softmax over the text's keys up to here and this row's own keys of the steps since."""
    batch, shared, group, width, size = queries.shape
    scores = queries.flatten(2, 3) @ text.keys.transpose(-1, -2)
    hidden = torch.ones(width, width, dtype=torch.bool, device=queries.device).triu(1)
    scores = scores.view(batch, shared, group, width, width).masked_fill(hidden, -torch.inf)
    own = [(queries * step.keys[:, :, None]).sum(dim=-1, keepdim=True) for step in chain]
    weights = (torch.cat([scores, *(part.to(scores.dtype) for part in own)], dim=-1) * size**-0.5).softmax(dim=-1)
    weights = weights.to(text.values.dtype)
    mixed: Tensor = (weights[..., :width].flatten(2, 3) @ text.values).view(queries.shape)
    for number, step in enumerate(chain):
        mixed = mixed + weights[..., width + number, None] * step.values[:, :, None]
    return mixed
