"""A DFlash head written down plainly in float64: one block, no batch, no cache, head by head.

It reads tensors by their published names and shares no code with paceline.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.heads.dflash import DFlashConfig, DFlashHead

Tensors = dict[str, Tensor]


def random_head(seed: int = 0, **changes: Any) -> DFlashHead:
    """A random head over a random target of 50 tokens; nothing in it starts at zero."""
    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 40, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
        "vocab_size": 50, "draft_vocab_size": 50, "target_hidden_size": 32, "feature_layers": (1, 3), "block_size": 5,
        "mask_token_id": 49,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = DFlashHead(DFlashConfig(**{**sizes, **changes}))
        for name, value in head.named_parameters():
            scale = 0.5 if "norm" in name else 0.3
            value.data = torch.randn_like(value) * scale + (1.0 if "norm" in name or "base_kernel" in name else 0.0)
        embedding = torch.randn(50, head.config.hidden_size, dtype=torch.float64)
    head.bind_target(
        lambda tokens: embedding[tokens], lambda states: (states.double() @ embedding.T).to(states.dtype)
    )
    return head.eval().requires_grad_(False)


def tensors_of(head: DFlashHead) -> Tensors:
    tensors = {name: value.double() for name, value in head.state_dict().items()}
    every = torch.arange(head.config.vocab_size)
    output = head.target.lm_head(torch.eye(head.config.hidden_size, dtype=head.like.dtype)).T
    return {**tensors, "target.embed": head.target.embed(every).double(), "target.lm_head": output.double()}


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rotated(vectors: Tensor, positions: Tensor, theta: float) -> Tensor:
    """vectors [n, head_dim]"""
    half = vectors.shape[1] // 2
    angles = positions[:, None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    a, b = vectors[:, :half], vectors[:, half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=1)


def convolved(x: Tensor, deltas: Tensor, base: Tensor, group_size: int) -> Tensor:
    """deltas [rows, taps, groups], base [taps, channels]"""
    output = torch.zeros_like(x)
    for row in range(x.shape[0]):
        for tap in range(base.shape[0]):
            if row - tap >= 0:
                weight = base[tap] + deltas[row, tap].repeat_interleave(group_size)
                output[row] += weight * x[row - tap]
    return output


def attention(t: Tensors, prefix: str, config: DFlashConfig, layer: int, context: Tensor, x: Tensor) -> Tensor:
    """x: the normed rows of the block, whose first position is the length of the context."""
    size, count = config.head_dim, context.shape[0]
    vectors = torch.cat([context, x])
    keys, values = vectors @ t[f"{prefix}k_proj.weight"].T, vectors @ t[f"{prefix}v_proj.weight"].T
    queries = x @ t[f"{prefix}q_proj.weight"].T
    columns, rows = torch.arange(vectors.shape[0]), torch.arange(count, vectors.shape[0])
    seen = config.visibility(layer)
    hidden = torch.zeros(rows.shape[0], columns.shape[0], dtype=torch.bool)
    for row, place in enumerate(rows.tolist()):
        for column in columns.tolist():
            far = bool(seen.window) and abs(column - place) >= seen.window
            hidden[row, column] = far or (seen.causal and column > place)
    mixed = torch.zeros(x.shape[0], config.num_heads * size, dtype=torch.float64)
    for head in range(config.num_heads):
        own, kv = slice(head * size, (head + 1) * size), head // (config.num_heads // config.num_kv_heads)
        shared = slice(kv * size, (kv + 1) * size)
        query = rms(queries[:, own], t[f"{prefix}q_norm.weight"], config.rms_norm_eps)
        key = rms(keys[:, shared], t[f"{prefix}k_norm.weight"], config.rms_norm_eps)
        query, key = rotated(query, rows, config.rope_theta), rotated(key, columns, config.rope_theta)
        scores = (query @ key.T / math.sqrt(size)).masked_fill(hidden, -math.inf)
        if config.attention_sinks:
            sink = t[f"{prefix}attention_sink_bias"][head].expand(rows.shape[0], 1)
            scores = torch.cat([scores, sink], dim=1)
        mixed[:, own] = torch.softmax(scores, dim=1)[:, : columns.shape[0]] @ values[:, shared]
    return mixed @ t[f"{prefix}o_proj.weight"].T


def mlp(t: Tensors, prefix: str, x: Tensor) -> Tensor:
    gate = x @ t[f"{prefix}gate_proj.weight"].T
    return (gate * torch.sigmoid(gate) * (x @ t[f"{prefix}up_proj.weight"].T)) @ t[f"{prefix}down_proj.weight"].T


def block_states(t: Tensors, config: DFlashConfig, features: Tensor, anchor: int) -> Tensor:
    """The states of one block after the final norm. features: of every position before the anchor, [n, joined]."""
    eps = config.rms_norm_eps
    context = rms(features.double() @ t["fc.weight"].T, t["hidden_norm.weight"], eps)
    ids = [anchor] + [config.mask_token_id] * (config.block_size - 1)
    x = t["target.embed"][ids] * config.input_embedding_scale
    for layer in range(config.num_layers):
        at = f"layers.{layer}."
        attend = partial(attention, t, f"{at}self_attn.", config, layer, context)
        for name, norm, work in (
            ("attention", "input_layernorm", attend),
            ("mlp", "post_attention_layernorm", partial(mlp, t, f"{at}mlp.")),
        ):
            normed = rms(x, t[f"{at}{norm}.weight"], eps)
            if not config.conv_kernel_size:
                x = x + work(normed)
                continue
            groups = config.hidden_size // config.conv_group_size
            deltas = (normed @ t[f"{at}{name}_conv.kernel_projection.weight"].T).view(
                config.block_size, 2, config.conv_kernel_size, groups
            )
            base = t[f"{at}{name}_conv.base_kernel"]
            output = work(convolved(normed, deltas[:, 0], base[0], config.conv_group_size))
            x = x + convolved(output, deltas[:, 1], base[1], config.conv_group_size)
    return rms(x, t["norm.weight"], eps)


def block_logits(t: Tensors, config: DFlashConfig, states: Tensor) -> Tensor:
    output = t.get("lm_head.weight", t["target.lm_head"])
    logits = states @ output.T * config.output_multiplier
    cap = config.logit_softcap
    return cap * torch.tanh(logits / cap) if cap else logits


def drafted(t: Tensors, config: DFlashConfig, features: Tensor, anchor: int) -> list[int]:
    """The greedy draft tokens of one block, ids of the target."""
    states = block_states(t, config, features, anchor)
    logits = block_logits(t, config, states)
    offsets = t["d2t"].long() if "d2t" in t else torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    previous, memory = anchor, torch.zeros(max(config.markov_rank, 1), dtype=torch.float64)
    tokens: list[int] = []
    for row in range(config.first_row, config.block_size):
        scores = logits[row]
        if config.markov_rank:
            w1 = t["markov_head.markov_w1.weight"][previous]
            latent = w1
            if config.markov_kind == "gated":
                joined = torch.cat([states[row], w1])
                gate = t["markov_head.gate_proj.weight"] @ joined + t["markov_head.gate_proj.bias"]
                latent = torch.sigmoid(gate) * w1
            elif config.markov_kind == "rnn":
                joined = torch.cat([memory, w1, states[row]])
                output = t["markov_head.joint_proj.weight"] @ joined + t["markov_head.joint_proj.bias"]
                gate, new, out = output.chunk(3)
                memory = torch.sigmoid(gate) * memory + (1 - torch.sigmoid(gate)) * torch.tanh(new)
                latent = torch.tanh(out)
            scores = scores + t["markov_head.markov_w2.weight"] @ latent
        if config.selector_rank:
            g = t["candidate_selector.hidden_projection.weight"] @ states[row]
            before = t["candidate_selector.predecessor_codebook"][previous] * g
            best = torch.full_like(scores, -torch.inf)
            for token in scores.argsort(descending=True)[: config.selector_top_k].tolist():
                best[token] = scores[token] + before @ t["candidate_selector.successor_codebook"][token]
            scores = best
        choice = int(scores.argmax())
        previous = choice + int(offsets[choice])
        tokens.append(previous)
    return tokens
