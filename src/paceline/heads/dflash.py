"""DFlash heads: one pass of a few layers writes a whole block of draft tokens.

    c      = head.context(features)                  of rows the target has computed
    states = head.forward_block(ids, stores, …)      the anchor (the last token of the sequence), mask tokens
    head.logits(states)                              row j is the draft for the anchor's position + j; row 0 is none

Context keys and values are linear in c, so they are written once, when the target's states arrive; those of the block
last for one pass. DFlash 2 adds a convolution inside the block and a selector of candidates, DSpark a Markov head and
a confidence head and rows that are shifted by one (sample_from_anchor), JetSpec causal attention inside the block.
Papers: DFlash, https://arxiv.org/abs/2602.06036; DSpark, https://arxiv.org/abs/2607.05147;
JetSpec, https://arxiv.org/abs/2606.18394
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import OptionError
from paceline.heads.attention import JoinedKeys, KeyStore, KeyValues, Rotary, RotarySettings
from paceline.heads.block_attention import SLIDING, Angles, BlockAttention, BlockAttentionSettings, Visibility
from paceline.heads.block_convolution import BlockConvolution
from paceline.heads.candidate_selector import CandidateSelector
from paceline.heads.eagle import BoundTarget, EagleNorm, Function, _Mlp
from paceline.heads.markov_head import ConfidenceHead, MarkovHead


@dataclass(frozen=True, slots=True)
class DFlashConfig:
    """Sizes and variants of a head.

    vocab_size          of the target; draft_vocab_size: the tokens the head can predict
    feature_layers      layers of the target whose entering states are joined: z-lab's target_layer_ids + 1
    block_size          rows of a block: the anchor and mask tokens
    layer_types         "full_attention" or "sliding_attention" of each layer; (): all full
    causal              whether the rows of a block see only those before them; None: on sliding layers only
    sample_from_anchor  row j is the draft for the position after its own (DSpark), not for its own (DFlash)
    conv_kernel_size    taps of DFlash 2's convolution, 0: none
    selector_rank       of DFlash 2's candidate selector, 0: none
    markov_rank         of DSpark's Markov head, 0: none
    own_lm_head         the checkpoint has an output head; otherwise the target's is used, or its rows of the draft
                        vocabulary
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    feature_layers: tuple[int, ...]
    block_size: int
    mask_token_id: int
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    max_seq_len: int = 2048
    rms_norm_eps: float = 1e-6
    sliding_window: int = 0
    layer_types: tuple[str, ...] = ()
    causal: bool | None = None
    sample_from_anchor: bool = False
    conv_kernel_size: int = 0
    conv_group_size: int = 16
    selector_rank: int = 0
    selector_top_k: int = 16
    markov_rank: int = 0
    markov_kind: str = "vanilla"
    confidence_head: bool = False
    confidence_reads_markov: bool = False
    attention_bias: bool = False
    attention_sinks: bool = False
    own_embeddings: bool = False
    own_lm_head: bool = False
    own_mask_embedding: bool = False
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    logit_softcap: float = 0.0  # 0: none

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise OptionError(f"{self.num_heads} query heads cannot share {self.num_kv_heads} key heads evenly")
        if self.block_size < 2:
            raise OptionError(f"a block needs 2 tokens or more, not {self.block_size}")
        if not self.feature_layers or list(self.feature_layers) != sorted(self.feature_layers):
            raise OptionError(f"a block drafter reads layers in rising order, not {self.feature_layers}")
        if self.layer_types and len(self.layer_types) != self.num_layers:
            raise OptionError(f"{self.num_layers} layers need as many layer_types, not {len(self.layer_types)}")
        if SLIDING in self.layer_types and self.sliding_window < 1:
            raise OptionError("sliding_attention needs a sliding_window")
        if self.selector_rank and self.markov_rank:
            raise OptionError("a head has a candidate selector or a Markov head, not both")
        if self.confidence_reads_markov and not self.markov_rank:
            raise OptionError("a confidence head that reads the Markov head needs one: markov_rank is 0")

    @property
    def first_row(self) -> int:
        """The row of a block that drafts the first token."""
        return 0 if self.sample_from_anchor else 1

    @property
    def max_draft_tokens(self) -> int:
        """Tokens one block drafts."""
        return self.block_size - self.first_row

    @property
    def is_reduced(self) -> bool:
        """Whether the head predicts only some tokens of the target."""
        return self.draft_vocab_size < self.vocab_size

    def visibility(self, layer: int) -> Visibility:
        """What the rows of a block see in this layer."""
        sliding = bool(self.layer_types) and self.layer_types[layer] == SLIDING
        return Visibility(sliding if self.causal is None else self.causal, self.sliding_window if sliding else 0)

    @property
    def is_causal(self) -> bool:
        """Whether no layer lets a row see rows after it: a shorter block drafts the same tokens."""
        return all(self.visibility(layer).causal for layer in range(self.num_layers))


def usual_target_layers(num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """The target_layer_ids of a head of `num_layers` layers whose config names none."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + index * (num_target_layers - 4) / (num_layers - 1)) for index in range(num_layers))


class BlockLayer(nn.Module):
    """One transformer layer over the rows of a block."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.self_attn = BlockAttention(
            BlockAttentionSettings(
                config.hidden_size,
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                config.rms_norm_eps,
                config.attention_bias,
                config.attention_sinks,
            )
        )
        self.mlp = _Mlp(config.hidden_size, config.intermediate_size)
        self.input_layernorm = EagleNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = EagleNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attention_conv, self.mlp_conv = _convolution(config), _convolution(config)

    def forward(self, states: Tensor, angles: Angles, mask: Tensor | None, store: KeyStore) -> Tensor:
        normed: Tensor = self.input_layernorm(states)
        if self.attention_conv is None:
            states = states + self.self_attn(normed, angles, mask, store)
        else:
            given = self.attention_conv.before(normed)
            attended = self.self_attn(given.states, angles, mask, store)
            states = states + self.attention_conv.after(attended, given.output_weights)
        normed = self.post_attention_layernorm(states)
        if self.mlp_conv is None:
            return states + self.mlp(normed)
        given = self.mlp_conv.before(normed)
        return states + self.mlp_conv.after(self.mlp(given.states), given.output_weights)


def _convolution(config: DFlashConfig) -> BlockConvolution | None:
    if not config.conv_kernel_size:
        return None
    return BlockConvolution(config.hidden_size, config.conv_kernel_size, config.conv_group_size, config.block_size)


class DFlashHead(nn.Module):
    """A DFlash head of any variant. `bind_target` comes before drafting or training."""

    d2t: Tensor | None
    t2d: Tensor | None
    mask_embedding: nn.Parameter | None

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        self._target: BoundTarget | None = None
        size, eps = config.hidden_size, config.rms_norm_eps
        self.rotary = Rotary(
            RotarySettings(config.head_dim, config.rope_theta, config.max_seq_len, config.rope_scaling)
        )
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_layers))
        self.fc = nn.Linear(len(config.feature_layers) * config.target_hidden_size, size, bias=False)
        self.hidden_norm = EagleNorm(size, eps=eps)
        self.norm = EagleNorm(size, eps=eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if config.own_embeddings else None
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False) if config.own_lm_head else None
        self.candidate_selector = _selector(config)
        self.markov_head = _markov_head(config)
        self.confidence_head = _confidence_head(config)
        self.register_parameter(
            "mask_embedding", nn.Parameter(torch.zeros(size)) if config.own_mask_embedding else None
        )
        ids = torch.arange(config.vocab_size)
        reduced = config.is_reduced
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64) if reduced else None)
        self.register_buffer("t2d", ids < config.draft_vocab_size if reduced else None)

    @property
    def like(self) -> Tensor:
        """A tensor of the head's device and of the dtype it computes in."""
        return self.norm.weight

    @property
    def dtype(self) -> torch.dtype:
        """What the rows of a block are computed in: under autocast its dtype, which halves the memory of training."""
        kind = self.like.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.like.dtype

    @property
    def target(self) -> BoundTarget:
        assert self._target is not None, "bind_target() comes first"
        return self._target

    @torch.no_grad()
    def bind_target(self, embed: Function, lm_head: Function) -> None:
        """Use these functions of the target: token ids -> input vectors, and hidden states -> logits.

        A head with a reduced vocabulary and no output head of its own takes its rows of the target's now; they are no
        part of its checkpoint.
        """
        self._target = BoundTarget(embed, lm_head)
        if self.lm_head is None and self.config.is_reduced:
            size = self.config.hidden_size
            rows = lm_head(torch.eye(size, dtype=self.like.dtype, device=self.like.device))[:, self.target_ids].T
            self.lm_head = nn.Linear(size, self.config.draft_vocab_size, bias=False, device="meta")
            self.lm_head.weight = nn.Parameter(rows.to(self.like.dtype).contiguous(), requires_grad=False)

    # --- one pass -----------------------------------------------------------------------------------------------------

    def context(self, features: Tensor) -> Tensor:
        """States of the target [..., joined] -> c [..., hidden_size]. Once for every token the target has read."""
        c: Tensor = self.hidden_norm(self.fc(features.to(self.like.dtype)))
        return c

    def context_stores(self, c: Tensor, positions: Tensor) -> list[KeyStore]:
        """For each layer a store whose first columns are the context's. c [batch, n, hidden], positions [.., n].

        Keeps gradients. Drafting writes the same keys and values into buffers, by one product (ContextProduct).
        """
        stores: list[KeyStore] = []
        for entries in self.context_entries(c, positions):
            store = JoinedKeys()
            store.entries = entries
            stores.append(store)
        return stores

    def context_entries(self, c: Tensor, positions: Tensor) -> list[KeyValues]:
        """Keys and values of the context in each layer. Keeps gradients."""
        angles = Angles.of(self.rotary, positions, c.dtype)
        return [self._attention(layer).entries(c, angles) for layer in range(len(self.layers))]

    def _attention(self, layer: int) -> BlockAttention:
        block: BlockLayer = self.layers[layer]  # type: ignore[assignment]
        return block.self_attn

    def embed(self, tokens: Tensor) -> Tensor:
        """Token ids of the target -> input vectors of a block."""
        if self.embed_tokens is not None:
            vectors: Tensor = self.embed_tokens(tokens)
        else:
            vectors = self.target.embed(tokens).to(self.dtype)
        if self.config.input_embedding_scale != 1:
            vectors = vectors * self.config.input_embedding_scale
        if self.mask_embedding is not None:
            vectors = torch.where((tokens == self.config.mask_token_id)[..., None], self.mask_embedding, vectors)
        return vectors

    def forward_block(
        self, ids: Tensor, stores: Sequence[KeyStore], positions: Tensor, masks: Sequence[Tensor | None]
    ) -> Tensor:
        """One pass over blocks, one after another in each row of the batch.

        ids        int64 [batch, rows]: of each block the anchor, then mask tokens
        stores     of each layer; `extend` returns the columns of its mask in their order
        positions  int64 [batch or 1, rows]
        masks      of each layer, bool, broadcast to [batch, 1, rows, columns]; None: every row sees all columns
        Returns [batch, rows, hidden_size] after the final norm: the input of `logits`.
        """
        states, angles = self.embed(ids), Angles.of(self.rotary, positions, self.dtype)
        for layer, mask, store in zip(self.layers, masks, stores, strict=True):
            states = layer(states, angles, mask, store)
        normed: Tensor = self.norm(states)
        return normed

    def layer_masks(self, mask: Tensor | None, rows: Tensor, columns: Tensor) -> list[Tensor | None]:
        """The mask of every layer: a mask that all share, without what a layer's window and causality hide.

        rows, columns: positions, int64 [batch or 1, ...]
        """
        kinds = [self.config.visibility(layer) for layer in range(self.config.num_layers)]
        narrowed = {kind: kind.narrowed(mask, rows, columns) for kind in set(kinds)}
        return [narrowed[kind] for kind in kinds]

    def logits(self, states: Tensor) -> Tensor:
        """Output of `forward_block` -> logits over the tokens the head can predict. [..., draft_vocab_size]"""
        logits: Tensor = self.target.lm_head(states) if self.lm_head is None else self.lm_head(states)
        if self.config.output_multiplier != 1:
            logits = logits * self.config.output_multiplier
        cap = self.config.logit_softcap
        return torch.tanh(logits / cap) * cap if cap else logits

    # --- the draft vocabulary -----------------------------------------------------------------------------------------

    def to_target_ids(self, ids: Tensor) -> Tensor:
        """Ids of the head's own vocabulary -> ids of the target."""
        return ids if self.d2t is None else ids + self.d2t[ids]

    @property
    def target_ids(self) -> Tensor:
        """The target's id of every token the head can predict. int64 [draft_vocab_size]"""
        return self.to_target_ids(torch.arange(self.config.draft_vocab_size, device=self.like.device))

    def choose_vocabulary(self, target_ids: Tensor) -> None:
        """Restrict the head to these tokens of the target: rising ids, as many as draft_vocab_size."""
        if self.d2t is None or self.t2d is None or target_ids.shape != self.d2t.shape:
            raise OptionError(f"this head predicts {self.config.draft_vocab_size} tokens, not {target_ids.numel()}")
        ids = target_ids.to(self.d2t.device)
        self.d2t.copy_(ids - torch.arange(ids.numel(), device=ids.device))
        self.t2d.zero_()
        self.t2d[ids] = True


def _selector(config: DFlashConfig) -> CandidateSelector | None:
    if not config.selector_rank:
        return None
    return CandidateSelector(
        config.hidden_size, config.selector_rank, config.selector_top_k, config.vocab_size, config.draft_vocab_size
    )


def _markov_head(config: DFlashConfig) -> MarkovHead | None:
    if not config.markov_rank:
        return None
    return MarkovHead(
        config.markov_kind, config.markov_rank, config.hidden_size, config.vocab_size, config.draft_vocab_size
    )


def _confidence_head(config: DFlashConfig) -> ConfidenceHead | None:
    if not config.confidence_head:
        return None
    return ConfidenceHead(config.hidden_size + (config.markov_rank if config.confidence_reads_markov else 0))


class ContextProduct(nn.Module):
    """Context keys and values of all layers by one product. For drafting: the weights are copies, without gradients.

    Its outputs have num_layers · num_kv_heads heads, those of the first layer first.
    """

    norms: Tensor

    def __init__(self, head: DFlashHead) -> None:
        super().__init__()
        blocks = [head._attention(layer) for layer in range(len(head.layers))]
        products = [block.k_proj for block in blocks] + [block.v_proj for block in blocks]
        weight = torch.cat([product.weight for product in products]).detach().clone()
        self.product = nn.Linear(weight.shape[1], weight.shape[0], bias=products[0].bias is not None, device="meta")
        self.product.weight = nn.Parameter(weight, requires_grad=False)
        if products[0].bias is not None:
            bias = torch.cat([product.bias for product in products]).detach().clone()
            self.product.bias = nn.Parameter(bias, requires_grad=False)
        norms = torch.stack([block.k_norm.weight for block in blocks]).repeat_interleave(head.config.num_kv_heads, 0)
        self.register_buffer("norms", norms.detach())  # [heads of all layers, head_dim]
        self._rotary, self._eps = head.rotary, head.config.rms_norm_eps

    def forward(self, c: Tensor, positions: Tensor) -> KeyValues:
        """c [batch, n, hidden_size], positions int64 [batch or 1, n]"""
        joined: Tensor = self.product(c).view(*c.shape[:-1], 2, *self.norms.shape)
        keys = nn.functional.rms_norm(joined[..., 0, :, :], self.norms.shape[-1:], None, self._eps) * self.norms
        keys = Angles.of(self._rotary, positions, c.dtype).rotated(keys)
        return KeyValues(keys.transpose(1, 2), joined[..., 1, :, :].transpose(1, 2))
