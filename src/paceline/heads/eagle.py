"""What EAGLE heads share: one transformer layer that continues the target's own hidden states.

    g   = head.fuse(features)                       of rows the target has computed
    out = head.block(embeddings, g, positions, ...) the embedding of token t+1 beside the state at t
    head.logits(out) -> logits of token t+2;        `out` itself is the next g

heads/eagle1.py and heads/eagle3.py hold the two kinds. Drafting and training use the same four calls.
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
from paceline.heads.kv_cache import KeyBuffers

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Sizes of a head.

    vocab_size        of the target
    draft_vocab_size  the tokens the head can predict
    own_embeddings    the checkpoint has an embedding; otherwise the target's is used
    before_final_norm of a head that reads the last states: those before the target's final norm, not after
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    max_seq_len: int = 2048
    rms_norm_eps: float = 1e-5
    fc_bias: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    own_embeddings: bool = False
    before_final_norm: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise OptionError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key heads evenly")

    @property
    def feature_count(self) -> int:
        """Hidden states joined in one row of features."""
        return 1


@dataclass(frozen=True, slots=True)
class BoundTarget:
    """What a head uses of its target. A record, not a module: the target's weights are no part of the head."""

    embed: Function  # token ids -> input vectors
    lm_head: Function  # hidden states after the final norm -> logits


class EagleNorm(nn.RMSNorm):
    """Root-mean-square norm in the dtype of its input: torch has no fused form for weights of another dtype, and
    training with bf16 states would spend more time in norms than in products."""

    def forward(self, states: Tensor) -> Tensor:
        return functional.rms_norm(states, self.normalized_shape, self.weight.to(states.dtype), self.eps)


class _Mlp(nn.Module):
    """The gated feed-forward part of a Llama layer."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))
        return out


class EagleLayer(nn.Module):
    """The one transformer layer of a head."""

    def __init__(self, config: EagleConfig, input_size: int) -> None:
        """input_size: of the attention; its output has hidden_size."""
        super().__init__()
        settings = AttentionSettings(
            input_size,
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.qkv_bias,
            config.output_bias,
        )
        rotary = RotarySettings(config.head_dim, config.rope_theta, config.max_seq_len, config.rope_scaling)
        self.self_attn = Attention(settings, rotary)
        self.mlp = _Mlp(config.hidden_size, config.intermediate_size)
        self.post_attention_layernorm = EagleNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, inputs: Tensor, residual: Tensor, positions: Tensor, mask: Tensor | None, store: KeyStore | None
    ) -> Tensor:
        states: Tensor = residual + self.self_attn(inputs, positions, mask, store)
        out: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out


class ChainHead(nn.Module):
    """A head that continues states of its target token by token. `bind_target` comes before drafting or training."""

    config: EagleConfig
    can_capture = True  # whether a CUDA graph can hold a pass
    max_draft_tokens: int | None = None  # that it was trained to draft in a row; None: any number
    tokens_ahead = 1  # after the position of a state, that what is stored for it depends on
    mask_token_id: int | None = None  # of a head that drafts all tokens in one pass: in the place of unknown ones

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        self._target: BoundTarget | None = None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embeddings else None

    @property
    def like(self) -> Tensor:
        """A tensor of the head's device and of the dtype it computes in."""
        raise NotImplementedError

    def key_buffers(self) -> KeyBuffers:
        """New buffers for the keys and values of its passes."""
        return KeyBuffers(self.config.num_kv_heads, self.config.head_dim, self.like)

    @property
    def target(self) -> BoundTarget:
        assert self._target is not None, "bind_target() comes first"
        return self._target

    def bind_target(self, embed: Function, lm_head: Function) -> None:
        """Use these functions of the target: token ids -> input vectors, and hidden states -> logits."""
        self._target = BoundTarget(embed, lm_head)

    # --- what the head reads ------------------------------------------------------------------------------------------

    def feature_layers(self, num_layers: int, chosen: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Of a target with `num_layers` layers, those whose entering states are read; (): the last hidden state."""
        raise NotImplementedError

    # --- the four calls -----------------------------------------------------------------------------------------------

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids of the target -> vectors, by the head's own embedding or else the target's."""
        if self.embed_tokens is not None:
            vectors: Tensor = self.embed_tokens(tokens)
            return vectors
        return self.target.embed(tokens).to(self.like.dtype)

    def fuse(self, features: Tensor) -> Tensor:
        """States of the target -> g."""
        raise NotImplementedError

    def block(
        self,
        embeddings: Tensor,
        g: Tensor,
        positions: Tensor,
        mask: Tensor | None = None,
        store: KeyStore | None = None,
    ) -> Tensor:
        """One pass. Row i pairs the state at one position with the embedding of the token AFTER it.

        embeddings, g  [batch, rows, hidden_size]
        positions      int64 [batch or 1, rows]
        mask           bool, broadcast to [batch, 1, rows, columns]: the columns of the store each row attends to
        store          stores the keys and values of this pass and returns all of them; None: only this pass
        Returns [batch, rows, hidden_size]: the input of `logits`, and the next g.
        """
        raise NotImplementedError

    def logits(self, out: Tensor) -> Tensor:
        """Output of `block` -> logits over the tokens the head can predict. [..., draft_vocab_size]"""
        raise NotImplementedError

    def mask_state(self) -> Tensor:
        """What a position beside the mask token reads in place of a state; of heads with a mask token. [hidden_size]"""
        raise NotImplementedError

    # --- the draft vocabulary -----------------------------------------------------------------------------------------

    def to_target_ids(self, ids: Tensor) -> Tensor:
        """Ids of the head's own vocabulary -> ids of the target."""
        raise NotImplementedError

    @property
    def target_ids(self) -> Tensor:
        """The target's id of every token the head can predict. int64 [draft_vocab_size]"""
        return self.to_target_ids(torch.arange(self.config.draft_vocab_size, device=self.like.device))

    def choose_vocabulary(self, target_ids: Tensor) -> None:
        """Restrict the head to these tokens of the target: rising ids, as many as draft_vocab_size."""
        raise OptionError(f"this head predicts {self.config.draft_vocab_size} tokens, not {target_ids.numel()}")


class LastStateHead(ChainHead):
    """A head that continues the target's last hidden state as it is, and predicts with the target's output head."""

    def feature_layers(self, num_layers: int, chosen: tuple[int, ...] = ()) -> tuple[int, ...]:
        return (num_layers,) if self.config.before_final_norm else ()

    def fuse(self, features: Tensor) -> Tensor:
        """The last hidden state as it is; a target may run in another dtype than its head."""
        return features.to(self.like.dtype)

    def logits(self, out: Tensor) -> Tensor:
        return self.target.lm_head(out)

    def to_target_ids(self, ids: Tensor) -> Tensor:
        return ids


class EagleHead(ChainHead):
    """An EAGLE head of any kind."""

    midlayer: EagleLayer
    fc: nn.Linear

    def __init__(self, config: EagleConfig, layer: EagleLayer) -> None:
        super().__init__(config)
        self.midlayer = layer

    @property
    def like(self) -> Tensor:
        return self.midlayer.post_attention_layernorm.weight
