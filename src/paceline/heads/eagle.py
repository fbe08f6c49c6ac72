"""EAGLE heads: one transformer block that continues the target's own hidden states.

    g   = head.fuse(features)                       rows the target has computed
    out = head.block(embeddings, g, positions, ...) the embedding of token t+1 beside the state at t
    head.logits(out) -> draft tokens for token t+2;      `out` itself is the next g

EAGLE-1 and EAGLE-2 (one kind of weights, two tree policies) take the target's last hidden state as it is, and speak
through the target's own head. EAGLE-3 mixes states of three layers and has a head of its own over the tokens it
cares about. Drafting and training use the same four calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.errors import OptionError
from paceline.heads.attention import Attention, AttentionSettings, KeyStore, RotarySettings

EAGLE_1 = "eagle1"
EAGLE_3 = "eagle3"
KINDS = (EAGLE_1, EAGLE_3)
USUAL_FEATURES = 3
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Everything that shapes a head.

    vocab_size           of the target; draft_vocab_size: the tokens the head can say (eagle1: all of them)
    feature_layers       layers of the target whose entering states are joined (eagle3); () : the usual three
    norm_before_residual the residual is g after its norm (eagle3 only)
    norm_before_fc       features go through one norm before they are mixed (eagle3 only); fc_norm: one a layer
    norm_output          the next g is the output after the final norm, not before it (eagle3 only)
    own_embeddings       the checkpoint brings an embedding; otherwise the target's is used
    """

    kind: str
    hidden_size: int
    intermediate_size: int
    heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    max_seq_len: int = 2048
    rms_norm_eps: float = 1e-5
    feature_layers: tuple[int, ...] = ()
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    own_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise OptionError(f"an EAGLE head is one of {', '.join(KINDS)}; not {self.kind!r}")
        if self.heads % self.num_kv_heads:
            raise OptionError(f"{self.heads} query heads cannot share {self.num_kv_heads} key heads evenly")
        if self.kind == EAGLE_1 and self.hidden_size != self.target_hidden_size:
            raise OptionError("an EAGLE-1 head is as wide as its target: it continues the target's own states")

    @property
    def feature_count(self) -> int:
        """Hidden states joined in one row of features."""
        return 1 if self.kind == EAGLE_1 else len(self.feature_layers) or USUAL_FEATURES


def usual_feature_layers(layers: int) -> tuple[int, ...]:
    """Layers whose entering states EAGLE-3 reads unless told: low, middle, high; of a shallow target, what it has."""
    wanted = (2, layers // 2, layers - 3)
    return tuple(min(max(layer, 0), layers) for layer in wanted)


@dataclass(frozen=True, slots=True)
class Borrowed:
    """What a head uses of its target. A record, not a module: the target's weights are no part of the head."""

    embed: Function  # token ids -> input vectors
    head: Function  # hidden states after the final norm -> logits


class _Norm(nn.RMSNorm):
    """Root-mean-square norm in the precision of what it is given: with weights of another one torch has no fused form
    of it, and training with bf16 states spends more time in norms than in products."""

    def forward(self, states: Tensor) -> Tensor:
        return functional.rms_norm(states, self.normalized_shape, self.weight.to(states.dtype), self.eps)


class _Mlp(nn.Module):
    """The gated feed-forward part of a Llama layer."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))
        return out


class _Layer(nn.Module):
    """The one transformer layer of a head. EAGLE-3 reads embedding and state side by side, EAGLE-1 their mixture."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        eagle3 = config.kind == EAGLE_3
        width = config.hidden_size
        self.norm_before_residual = config.norm_before_residual
        settings = AttentionSettings(
            2 * width if eagle3 else width,
            width,
            config.heads,
            config.num_kv_heads,
            config.head_dim,
            config.qkv_bias,
            config.output_bias,
        )
        rotary = RotarySettings(config.head_dim, config.rope_theta, config.max_seq_len, config.rope_scaling)
        self.self_attn = Attention(settings, rotary)
        self.mlp = _Mlp(width, config.intermediate_size)
        self.post_attention_layernorm = _Norm(width, eps=config.rms_norm_eps)
        if eagle3:
            self.hidden_norm = _Norm(width, eps=config.rms_norm_eps)
            self.input_layernorm = _Norm(width, eps=config.rms_norm_eps)

    def beside(self, embeddings: Tensor, states: Tensor) -> Tensor:
        """EAGLE-3's input of the attention: both vectors, each under its own norm. [..., 2 · width]"""
        return torch.cat([self.input_layernorm(embeddings), self.hidden_norm(states)], dim=-1)

    def forward(
        self, read: Tensor, residual: Tensor, positions: Tensor, mask: Tensor | None, store: KeyStore | None
    ) -> Tensor:
        states: Tensor = residual + self.self_attn(read, positions, mask, store)
        out: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out


class EagleHead(nn.Module):
    """An EAGLE head of either kind. `borrow` it what it uses of the target before drafting or training."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        self._target: Borrowed | None = None
        self.midlayer = _Layer(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embeddings else None
        if config.kind == EAGLE_1:
            self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
            return
        joined = config.feature_count * config.target_hidden_size
        self.fc = nn.Linear(joined, config.hidden_size, bias=config.fc_bias)
        eps = config.rms_norm_eps
        self.input_norm = _Norm(joined, eps=eps) if config.norm_before_fc else None
        norms = (_Norm(config.target_hidden_size, eps=eps) for _ in range(config.feature_count))
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.norm = _Norm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)

    def borrow(self, embed: Function, head: Function) -> None:
        """What the head uses of its target: token ids -> input vectors, and hidden states -> logits."""
        self._target = Borrowed(embed, head)

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids of the target -> vectors, by the head's own embedding or else the target's."""
        if self.embed_tokens is not None:
            vectors: Tensor = self.embed_tokens(tokens)
            return vectors
        assert self._target is not None, "borrow() first"
        return self._target.embed(tokens).to(self.fc.weight.dtype)

    def fuse(self, features: Tensor) -> Tensor:
        """States of the target -> g. eagle1: the last hidden state as it is; eagle3: several layers' states mixed."""
        features = features.to(self.fc.weight.dtype)  # a target may run in another precision than its head
        if self.config.kind == EAGLE_1:
            return features
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(self.config.feature_count, dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts)], dim=-1)
        g: Tensor = self.fc(features)
        return g

    def block(
        self,
        embeddings: Tensor,
        g: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        store: KeyStore | None = None,
    ) -> Tensor:
        """One pass. Row i pairs the state at some place with the embedding of the token AFTER it.

        embeddings, g  [batch, width, hidden]
        positions      int64 [batch or 1, width]
        mask           bool, broadcast to [batch, 1, width, seen]: which columns of the store each row may look at
        store          takes this pass's keys and values and hands back all that are seen; None: only this pass
        Returns [batch, width, hidden]: what `logits` reads, and the next g.
        """
        layer = self.midlayer
        if self.config.kind == EAGLE_1:
            mixed = self.fc(torch.cat([embeddings, g], dim=-1))
            out: Tensor = layer(mixed, mixed, positions, mask, store)
            return out
        residual = layer.hidden_norm(g) if layer.norm_before_residual else g
        out = layer(layer.beside(embeddings, g), residual, positions, mask, store)
        return self.norm(out) if self.config.norm_output else out

    def logits(self, out: Tensor) -> Tensor:
        """RowOutput of `block` -> logits over the tokens the head can say. [..., draft vocabulary]"""
        if self.config.kind == EAGLE_3:
            logits: Tensor = self.lm_head(out if self.config.norm_output else self.norm(out))
            return logits
        assert self._target is not None, "borrow() first"
        return self._target.head(out)

    def to_target_ids(self, ids: Tensor) -> Tensor:
        """Ids of the head's own vocabulary -> ids of the target."""
        return ids if self.config.kind == EAGLE_1 else ids + self.d2t[ids]

    @property
    def target_ids(self) -> Tensor:
        """The target's id of every token the head can say. int64 [draft vocabulary]"""
        size = self.config.draft_vocab_size
        device = self.fc.weight.device
        return self.to_target_ids(torch.arange(size, device=device))

    def choose_vocabulary(self, target_ids: Tensor) -> None:
        """Let the head say exactly these tokens of the target: rising ids, as many as draft_vocab_size."""
        if self.config.kind == EAGLE_1 or target_ids.shape != self.d2t.shape:
            raise OptionError(f"this head says {self.config.draft_vocab_size} tokens, not {target_ids.numel()}")
        ids = target_ids.to(self.d2t.device)
        self.d2t.copy_(ids - torch.arange(ids.numel(), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True
