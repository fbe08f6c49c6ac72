"""Gemma 2: windows in every other layer, softcaps, and norms before and after attention and MLP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.layers.attention import LayerAttention
from paceline.layers.mlp import ACTIVATIONS
from paceline.models.checkpoint import ModelCheckpoint
from paceline.models.config import ArchConfig, NormKind, arch_config, layer_windows, unsupported_field
from paceline.models.decoder import DecoderModel
from paceline.models.llama import LayerNames, read_layer, read_model

MODEL_TYPES = ("gemma2",)
NAMES = LayerNames(
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)
OWN_FIELDS = ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "sliding_window")


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    return unsupported_gemma(config) or unsupported_field(config, OWN_FIELDS)


def unsupported_gemma(config: Any) -> str | None:
    """What configs of this family may ask for and layers here do not have."""
    if getattr(config, "use_bidirectional_attention", None):
        return "use_bidirectional_attention is set"
    if config.hidden_activation not in ACTIVATIONS:
        return f"hidden_activation is {config.hidden_activation!r}"
    return None


def config_from_hf(config: Any) -> ArchConfig:
    scale, softcap = config.query_pre_attn_scalar**-0.5, config.attn_logit_softcapping
    kinds = [LayerAttention(scale=scale, window=window, softcap=softcap) for window in layer_windows(config)]
    return gemma_config(config, tuple(kinds))


def gemma_config(config: Any, kinds: tuple[LayerAttention, ...], *, qk_norm: bool = False) -> ArchConfig:
    """What the configs of this family share. kinds: attention of each layer."""
    bias = bool(config.attention_bias)
    return replace(
        arch_config(config, qkv_bias=bias, output_bias=bias, qk_norm=qk_norm),
        layer_attention=kinds,
        norm_kind=NormKind.ZERO_CENTERED,
        activation=ACTIVATIONS[config.hidden_activation],
        embedding_multiplier=config.hidden_size**0.5,
        logits_softcap=config.final_logit_softcapping,
    )


def load(checkpoint: ModelCheckpoint, config: ArchConfig) -> DecoderModel:
    """Read a model. Raises WeightsError that names a tensor which is missing, of another shape, or not used."""
    return load_gemma(checkpoint, config, NAMES)


def load_gemma(checkpoint: ModelCheckpoint, config: ArchConfig, names: LayerNames) -> DecoderModel:
    """The same for every model of this family. names: of the parts of its layers."""
    layers = [read_layer(checkpoint, config, index, names) for index in range(config.num_layers)]
    model = read_model(checkpoint, config, layers)
    # The multiplier is rounded to the type of the embedding, as it was in training.
    scale = float(torch.tensor(config.embedding_multiplier).to(model.embedding.dtype))
    return replace(model, scale_embedding=lambda rows: rows * scale, scale_logits=_softcap(config.logits_softcap))


def _softcap(limit: float | None) -> Callable[[Tensor], Tensor] | None:
    """The function that keeps logits within a limit; None: there is none."""
    return None if limit is None else lambda logits: torch.tanh(logits / limit) * limit
