"""What an MTP head drafts, computed in float64 from its published tensors: no cache, no batch, no library's layers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.mtp import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    LATENT,
    LAYERS,
    MIMO_V2,
    MULTI_LATENT,
    NOPE,
    QWEN,
    ROPE,
    VALUE,
)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: Tensor, positions: Tensor, theta: float, *, pairs: bool) -> Tensor:
    """[rows, heads, size]; pairs: value 2i turns with value 2i + 1, else with the value half a head further."""
    size = x.shape[-1]
    angles = positions[:, None, None] / theta ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    first, second = (x[..., ::2], x[..., 1::2]) if pairs else (x[..., : size // 2], x[..., size // 2 :])
    turned = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
    return torch.stack(turned, dim=-1).flatten(-2) if pairs else torch.cat(turned, dim=-1)


def causal(
    queries: Tensor, keys: Tensor, values: Tensor, size: int, window: int = 10**6, sinks: Tensor | None = None
) -> Tensor:
    """[rows, heads, size] each -> [rows, heads · size of values]

    window: how many rows a row sees, itself among them. sinks [heads]: a further score of each head, without a value
    """
    groups = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) / size**0.5
    every = torch.ones(scores.shape[-2:])
    hidden = every.triu(1).bool() | every.tril(-window).bool()
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, scores.shape[1], -1)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


class Reference:
    """One head over one target, both read from their files."""

    def __init__(self, model_type: str, folder: Path, config: dict[str, Any], module: int = 0) -> None:
        """module: of a head of several."""
        stored = {name: value.double() for name, value in load_file(folder / "model.safetensors").items()}
        self.is_mimo = model_type == MIMO_V2
        listed = f"model.mtp.layers.{module}." if self.is_mimo else f"model.layers.{LAYERS + module}."
        prefix = "mtp." if model_type in QWEN else listed
        self.zeroes_first = model_type not in QWEN and not self.is_mimo and module == 0
        self.head = {name.removeprefix(prefix): value for name, value in stored.items() if name.startswith(prefix)}
        self.embedding, self.lm_head = stored["model.embed_tokens.weight"], stored["lm_head.weight"]
        self.is_qwen, self.is_latent, self.config = model_type in QWEN, model_type in MULTI_LATENT, config
        self.layer = f"layers.{module}." if self.is_qwen else ""
        self.eps = float(config["rms_norm_eps"])
        rope = config["rope_parameters"]
        rope = rope["sliding_attention"] if self.is_mimo else rope
        self.theta, self.share = float(rope["rope_theta"]), float(rope.get("partial_rotary_factor", 1.0))

    # --- drafting -----------------------------------------------------------------------------------------------------

    def draft(self, states: Tensor, ids: list[int], num_tokens: int) -> list[int]:
        """The tokens after `ids`. states: of the target after its final norm, for all of them but the last."""
        g, tokens = states.double(), ids[1:]
        for _ in range(num_tokens):
            out = self.rows(g, tokens)[-1]
            tokens = [*tokens, int((self.lm_head @ out).argmax())]
            g = torch.cat([g, out[None]])
        return tokens[len(ids) - 1 :]

    def rows(self, g: Tensor, tokens: list[int]) -> Tensor:
        """The head's output at every position, which is also the next state. [rows, hidden_size]"""
        embedded = self.embedding[tokens].clone()
        if self.zeroes_first:
            embedded[0] = 0.0
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden") if self.is_qwen else ("enorm", "hnorm")
        parts = [self.norm(part, name) for part, name in zip((embedded, g), names)]
        x = torch.cat(parts, dim=-1) @ self.head["fc.weight" if self.is_qwen else "eh_proj.weight"].T
        x = x + self.attention(self.norm(x, f"{self.layer}input_layernorm"))
        x = x + self.mlp(self.norm(x, "pre_mlp_layernorm" if self.is_mimo else f"{self.layer}post_attention_layernorm"))
        listed = "final_layernorm" if self.is_mimo else "shared_head.norm"
        return self.norm(x, "norm" if self.is_qwen else listed)

    def norm(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        weight = self.head[f"{name}.weight"]
        return normed(x, 1.0 + weight if self.is_qwen else weight, self.eps if eps is None else eps)

    def apply(self, x: Tensor, name: str) -> Tensor:
        return x @ self.head[f"{self.layer}{name}.weight"].T

    # --- attention ----------------------------------------------------------------------------------------------------

    def attention(self, x: Tensor) -> Tensor:
        return self.latent_attention(x) if self.is_latent else self.grouped_attention(x)

    def grouped_attention(self, x: Tensor) -> Tensor:
        rows, prefix = x.shape[0], "self_attn."
        queries = self.apply(x, f"{prefix}q_proj").view(rows, HEADS, -1)
        queries, gates = queries[..., :HEAD_DIM], queries[..., HEAD_DIM:]
        keys = self.apply(x, f"{prefix}k_proj").view(rows, -1, HEAD_DIM)
        if self.is_qwen:
            queries, keys = (
                self.norm(part, f"{self.layer}{prefix}{name}_norm") for part, name in ((queries, "q"), (keys, "k"))
            )
        values = self.apply(x, f"{prefix}v_proj").view(rows, -1, HEAD_DIM)
        window, sinks = 10**6, None
        if self.is_mimo:
            values, sinks = values * self.config["attention_value_scale"], self.head[f"{prefix}attention_sink_bias"]
            window = self.config["sliding_window"]
        mixed = causal(self.turned(queries), self.turned(keys), values, HEAD_DIM, window, sinks)
        return self.apply(mixed * gates.flatten(1).sigmoid() if self.is_qwen else mixed, f"{prefix}o_proj")

    def turned(self, heads: Tensor) -> Tensor:
        size, positions = int(self.share * HEAD_DIM), torch.arange(heads.shape[0], dtype=torch.float64)
        first = rotated(heads[..., :size], positions, self.theta, pairs=False)
        return torch.cat([first, heads[..., size:]], dim=-1)

    def latent_attention(self, x: Tensor) -> Tensor:
        rows, positions = x.shape[0], torch.arange(x.shape[0], dtype=torch.float64)
        queries = self.norm(self.apply(x, "self_attn.q_a_proj"), "self_attn.q_a_layernorm", 1e-6)
        queries = self.apply(queries, "self_attn.q_b_proj").view(rows, HEADS, NOPE + ROPE)
        both = self.apply(x, "self_attn.kv_a_proj_with_mqa")
        latent = self.norm(both[:, :LATENT], "self_attn.kv_a_layernorm", 1e-6)
        unpacked = self.apply(latent, "self_attn.kv_b_proj").view(rows, HEADS, NOPE + VALUE)
        key = rotated(both[:, None, LATENT:], positions, self.theta, pairs=True).expand(-1, HEADS, -1)
        turned = rotated(queries[..., NOPE:], positions, self.theta, pairs=True)
        mixed = causal(
            torch.cat([queries[..., :NOPE], turned], dim=-1),
            torch.cat([unpacked[..., :NOPE], key], dim=-1),
            unpacked[..., NOPE:],
            NOPE + ROPE,
        )
        return self.apply(mixed, "self_attn.o_proj")

    # --- MLP ----------------------------------------------------------------------------------------------------------

    def mlp(self, x: Tensor) -> Tensor:
        if f"{self.layer}mlp.gate.weight" not in self.head:
            return self.gated(x, "mlp.")
        routed = torch.stack([self.routed(row) for row in x])
        if not self.is_qwen:
            return routed + self.gated(x, "mlp.shared_experts.")
        return routed + self.apply(x, "mlp.shared_expert_gate").sigmoid() * self.gated(x, "mlp.shared_expert.")

    def gated(self, x: Tensor, prefix: str) -> Tensor:
        gate, up = self.apply(x, f"{prefix}gate_proj"), self.apply(x, f"{prefix}up_proj")
        return self.apply(gate * gate.sigmoid() * up, f"{prefix}down_proj")

    def routed(self, row: Tensor) -> Tensor:
        scores, count = self.apply(row, "mlp.gate"), self.config["num_experts_per_tok"]
        scores = scores.softmax(dim=-1) if self.is_qwen else scores.sigmoid()
        bias = 0.0 if self.is_qwen else self.head["mlp.gate.e_score_correction_bias"]
        chosen = (scores + bias).topk(count).indices.tolist()
        weights = scores[chosen] / scores[chosen].sum()
        scale = 1.0 if self.is_qwen else self.config["routed_scaling_factor"]
        experts = [self.gated(row, f"mlp.experts.{index}.") for index in chosen]
        return scale * sum(weight * expert for weight, expert in zip(weights, experts))  # type: ignore[no-any-return]


def draft_by_modules(modules: list[Reference], states: Tensor, ids: list[int], num_tokens: int) -> list[int]:
    """The tokens after `ids`, one of each module: each reads what the one before made of all tokens, MiMo-V2's the
    states of the target."""
    g, tokens, drafts = states.double(), ids[1:], list[int]()
    for module in modules[:num_tokens]:
        out = module.rows(g, tokens)
        g = g if module.is_mimo else out
        drafts.append(int((module.lm_head @ out[-1]).argmax()))
        tokens = [*tokens[1:], drafts[-1]]
    return drafts


def true_states(folder: Path, ids: list[int]) -> Tensor:
    """States of a target after its final norm, by transformers in one pass without a cache. [tokens, hidden_size]"""
    with torch.no_grad():
        states: Tensor = _loaded(folder).model(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    assert states.shape == (len(ids), HIDDEN)
    return states


@cache
def _loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
