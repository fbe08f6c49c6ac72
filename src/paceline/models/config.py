"""The numbers of an architecture that a pass needs, read from a Hugging Face config."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from paceline.layers.attention import PLAIN_ATTENTION, LayerAttention
from paceline.layers.linear_attention import DeltaNetSizes
from paceline.layers.mlp import ACTIVATIONS, Activation
from paceline.layers.moe import ClampedSwiGlu
from paceline.layers.rope import (
    FIXED_ROPE_TYPES,
    RopeConfig,
    partial_rotary_factor,
    rope_config_of,
    rope_parameters_of,
    scaled_length,
)
from paceline.quantization.registry import format_of

# Fields that change the computation in some model, with the values that leave it as it is.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None,),
    "hidden_act": tuple(ACTIVATIONS),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "mlp_bias": (None, False),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1, 1.0),
    "rope_interleaved": (None, False),
}


class NormKind(Enum):
    """How the norms of a model are computed and stored."""

    RMS = auto()
    ZERO_CENTERED = auto()  # root-mean-square, the weight stored as its distance from one
    LAYER = auto()


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """A mixture of experts in the place of the MLP, but for the layers of `dense_layers`."""

    num_experts: int
    top_k: int  # experts of a token
    intermediate_size: int  # of one expert
    renormalize: bool = True  # the weights of a token's experts sum to one
    shared_intermediate_size: int = 0  # of the expert that every token passes; 0: there is none
    dense_layers: frozenset[int] = frozenset()
    activation: ClampedSwiGlu | None = None  # None: silu(gate) · up


@dataclass(frozen=True, slots=True, eq=False)
class ArchConfig:
    """Sizes of a decoder-only model, and which optional parts its layers have."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float  # of layer norms too
    max_seq_len: int
    tie_word_embeddings: bool
    rope: RopeConfig
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False  # queries and keys are normed head by head
    other_ropes: tuple[RopeConfig, ...] = ()  # rope tables that some layers use instead of the first
    layer_attention: tuple[LayerAttention, ...] = ()  # of each layer, without its tensors; empty: all are as Llama's
    norm_kind: NormKind = NormKind.RMS
    activation: Activation = Activation.SILU
    mlp_bias: bool = False
    parallel: bool = False  # the MLP of a layer reads what its attention reads
    lm_head_bias: bool = False
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what attention and MLP add to the residual stream
    logits_multiplier: float = 1.0
    recurrent_layers: tuple[int, ...] = ()  # layers that have a state instead of keys and values
    delta_net: DeltaNetSizes | None = None  # of those layers
    logits_softcap: float | None = None  # logits become softcap * tanh(logit / softcap)
    moe: MoeConfig | None = None

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """Every rope table, in the order of LayerAttention.rope."""
        return (self.rope, *self.other_ropes)

    @property
    def windows(self) -> frozenset[int | None]:
        """The windows of its layers; None among them: layers that see everything."""
        return frozenset(attention.window for attention in self.layer_attention) or frozenset({None})

    def attention(self, layer: int) -> LayerAttention:
        """What attention of one layer has of its own, without its tensors."""
        return self.layer_attention[layer] if self.layer_attention else PLAIN_ATTENTION

    @property
    def num_kv_layers(self) -> int:
        """Layers that have keys and values."""
        return self.num_layers - len(self.recurrent_layers)

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_sizes(self) -> list[int]:
        return [self.query_size, self.kv_size, self.kv_size]


def arch_config(
    config: Any,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
    interleaved_rope: bool = False,
    eps: str = "rms_norm_eps",
) -> ArchConfig:
    """The fields that Hugging Face configs of Llama-like models share. eps: the field with the epsilon of norms."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return ArchConfig(
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", 0),  # none where every layer has experts
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        vocab_size=config.vocab_size,
        rms_norm_eps=float(getattr(config, eps)),
        max_seq_len=max(int(config.max_position_embeddings), scaled_length(config)),
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        rope=rope_config_of(config, head_dim, interleaved=interleaved_rope),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        layer_attention=window_attention(config),
        activation=ACTIVATIONS[getattr(config, "hidden_act", "silu")],
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
    )


def layer_windows(config: Any) -> list[int | None]:
    """The window of each layer: one for all, or of those that layer_types calls sliding."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in types]


def mixed_windows(config: Any) -> str | None:
    """Why layers of different kinds cannot run where transformers gives every layer the window; None: they are one."""
    window = getattr(config, "sliding_window", None)
    if any(layer != window for layer in layer_windows(config)):
        return "layer_types has layers without the sliding_window, which all layers of this architecture have"
    return None


def window_attention(config: Any) -> tuple[LayerAttention, ...]:
    """What the layers of a config have of their own where windows are all that differs; empty: there are none."""
    windows = layer_windows(config)
    return tuple(LayerAttention(window=window) for window in windows) if any(windows) else ()


def unsupported_field(config: Any, supported: Collection[str] = ()) -> str | None:
    """The first field that asks for a computation which Llama-like layers do not have; None: there is none.

    supported: fields that the architecture reads itself
    """
    for name, neutral in NEUTRAL_VALUES.items():
        value = getattr(config, name, neutral[0])
        if name not in supported and value not in neutral:
            return f"{name} is {value!r}"
    rope = _unsupported_rope(config, "partial_rotary_factor" in supported)
    weights = _unsupported_weights(config, "rope_interleaved" in supported)
    attention = _unsupported_attention(config, "sliding_window" in supported)
    return attention or rope or weights


def _unsupported_attention(config: Any, windows: bool) -> str | None:
    layer_types = getattr(config, "layer_types", None) or []
    others = sorted(set(layer_types) - {"full_attention"} - ({"sliding_attention"} if windows else set()))
    if others:
        return f"layer_types has {', '.join(others)}"
    window = getattr(config, "sliding_window", None)
    if window and not windows and not layer_types and getattr(config, "use_sliding_window", True):
        return f"sliding_window is {window}"
    return None


def _unsupported_rope(config: Any, partial: bool) -> str | None:
    rope_type = rope_parameters_of(config).get("rope_type")
    if rope_type not in FIXED_ROPE_TYPES:
        return f"rope_type is {rope_type!r}"
    if partial_rotary_factor(config) != 1.0 and not partial:
        return f"partial_rotary_factor is {partial_rotary_factor(config)}"
    return None


def _unsupported_weights(config: Any, interleaved: bool) -> str | None:
    stored = getattr(config, "quantization_config", None)
    if stored is not None and format_of(config) is None:
        return "quantization_config names a weight format that is not registered"
    if stored is not None and (interleaved or partial_rotary_factor(config) != 1.0):
        return "quantization_config stores rows of queries and keys in an order that kernels do not rotate"
    return None
