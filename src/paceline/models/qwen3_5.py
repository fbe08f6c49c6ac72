"""Qwen3.5: three of four layers are gated delta nets, the others attention with a gate of its output.

Checkpoints with a vision part run as the language model in them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.layers.attention import HeadNorms, LayerAttention
from paceline.layers.feed_forward import Mlp
from paceline.layers.hybrid_layers import DeltaNetLayer, GatedAttentionLayer, HybridLayer, Projection
from paceline.layers.linear_attention import DeltaNetSizes, DeltaNetWeights
from paceline.layers.norm import zero_centered
from paceline.layers.rope import FIXED_ROPE_TYPES, in_order, rope_parameters_of
from paceline.models.checkpoint import ModelCheckpoint
from paceline.models.config import NEUTRAL_VALUES, ArchConfig, NormKind, arch_config
from paceline.models.decoder import DecoderModel
from paceline.models.llama import read_gated_mlp, read_model, read_norm
from paceline.quantization.registry import format_of

MODEL_TYPES = ("qwen3_5_text", "qwen3_5")
FULL, LINEAR = "full_attention", "linear_attention"
TEXT_PART = {"model.language_model.": "model."}
OTHER_PARTS = ("mtp.", "model.visual.")  # a head that drafts, and the vision part

ReadMlp = Callable[[ModelCheckpoint, ArchConfig, int], Mlp]


@dataclass(frozen=True, slots=True)
class DeltaNetNames:
    """What a checkpoint calls the input projections of a gated delta net, and the order of their rows."""

    projections: tuple[str, ...] = ("in_proj_qkv", "in_proj_b", "in_proj_a", "in_proj_z")
    order: Callable[[DeltaNetSizes], list[int]] | None = None  # None: as `gated_delta_net` reads them


SEPARATE = DeltaNetNames()


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    text = config.get_text_config()
    for name, neutral in (NEUTRAL_VALUES | {"hidden_act": ("silu",)}).items():
        if getattr(text, name, neutral[0]) not in neutral:
            return f"{name} is {getattr(text, name)!r}"
    if others := sorted(set(text.layer_types) - {FULL, LINEAR}):
        return f"layer_types has {', '.join(others)}"
    if (rope_type := rope_parameters_of(text).get("rope_type")) not in FIXED_ROPE_TYPES:
        return f"rope_type is {rope_type!r}"
    if getattr(config, "quantization_config", None) is not None and format_of(config) is None:
        return "quantization_config names a weight format that is not registered"
    return None


def config_from_hf(config: Any) -> ArchConfig:
    text = config.get_text_config()
    bias = bool(text.attention_bias)
    linear = tuple(index for index, kind in enumerate(text.layer_types) if kind == LINEAR)
    return replace(
        arch_config(text, qkv_bias=bias, output_bias=bias, qk_norm=True),
        tie_word_embeddings=bool(text.tie_word_embeddings or getattr(config, "tie_word_embeddings", False)),
        norm_kind=NormKind.ZERO_CENTERED,
        recurrent_layers=linear,
        delta_net=DeltaNetSizes(
            num_layers=len(linear),
            num_key_heads=text.linear_num_key_heads,
            num_value_heads=text.linear_num_value_heads,
            key_dim=text.linear_key_head_dim,
            value_dim=text.linear_value_head_dim,
            taps=text.linear_conv_kernel_dim,
        ),
    )


def load(checkpoint: ModelCheckpoint, config: ArchConfig) -> DecoderModel:
    """Read a model. Raises WeightsError that names a tensor which is missing, of another shape, or not used."""
    return read_hybrid(checkpoint, config, SEPARATE, read_mlp)


def read_hybrid(
    checkpoint: ModelCheckpoint, config: ArchConfig, names: DeltaNetNames, mlp_reader: ReadMlp
) -> DecoderModel:
    """Read a hybrid model. mlp_reader: reads the MLP of a layer."""
    text = checkpoint.renamed(TEXT_PART, dropped=OTHER_PARTS)
    layers: list[HybridLayer] = []
    for index in range(config.num_layers):
        mlp = mlp_reader(text, config, index)
        recurrent = index in config.recurrent_layers
        layer = _delta_net(text, config, index, mlp, names) if recurrent else _attention(text, config, index, mlp)
        layers.append(layer)
    return read_model(text, config, layers)


def read_mlp(checkpoint: ModelCheckpoint, config: ArchConfig, index: int) -> Mlp:
    """The MLP of a layer."""
    return read_gated_mlp(checkpoint, config, f"model.layers.{index}.mlp.")


# --- gated delta nets -------------------------------------------------------------------------------------------------


def _delta_net(
    checkpoint: ModelCheckpoint, config: ArchConfig, index: int, mlp: Mlp, names: DeltaNetNames
) -> DeltaNetLayer:
    sizes, layer, hidden_size = config.delta_net, f"model.layers.{index}.", config.hidden_size
    assert sizes is not None
    prefix = f"{layer}linear_attn."
    inputs = checkpoint.linear([prefix + name for name in names.projections], _rows(names, sizes), hidden_size)
    order = None if names.order is None else torch.tensor(names.order(sizes), device=checkpoint.device)
    return DeltaNetLayer(
        number=config.recurrent_layers.index(index),
        norm=read_norm(checkpoint, config, f"{layer}input_layernorm"),
        projection=Projection(inputs, order),
        output=Projection(checkpoint.linear([f"{prefix}out_proj"], [hidden_size], sizes.value_size)),
        mlp_norm=read_norm(checkpoint, config, f"{layer}post_attention_layernorm"),
        mlp=mlp,
        net=_net(checkpoint, sizes, prefix),
    )


def _rows(names: DeltaNetNames, sizes: DeltaNetSizes) -> list[int]:
    """Rows of each input projection."""
    heads = sizes.num_value_heads
    rows = {
        "in_proj_qkv": sizes.channels, "in_proj_b": heads, "in_proj_a": heads, "in_proj_z": sizes.value_size,
        "in_proj_qkvz": sizes.channels + sizes.value_size, "in_proj_ba": 2 * heads,
    }  # fmt: skip
    return [rows[name] for name in names.projections]


def _net(checkpoint: ModelCheckpoint, sizes: DeltaNetSizes, prefix: str) -> DeltaNetWeights:
    heads = sizes.num_value_heads
    return DeltaNetWeights(
        convolution=checkpoint.tensor(f"{prefix}conv1d.weight", sizes.channels, 1, sizes.taps)[:, 0].T.contiguous(),
        decay_rate=_exact(checkpoint, f"{prefix}A_log", heads),
        decay_bias=checkpoint.tensor(f"{prefix}dt_bias", heads),
        norm=checkpoint.tensor(f"{prefix}norm.weight", sizes.value_dim),
    )


def _exact(checkpoint: ModelCheckpoint, name: str, size: int) -> Tensor:
    """A vector as it is stored, where rounding it to 16 bits would change every state."""
    rounded = checkpoint.tensor(name, size)
    return checkpoint.raw(name).to(rounded.device, torch.promote_types(rounded.dtype, torch.float32))


# --- attention --------------------------------------------------------------------------------------------------------


def _attention(checkpoint: ModelCheckpoint, config: ArchConfig, index: int, mlp: Mlp) -> GatedAttentionLayer:
    layer, hidden_size = f"model.layers.{index}.", config.hidden_size
    prefix = f"{layer}self_attn."
    names, sizes = [f"{prefix}{part}_proj" for part in "qkv"], [2 * config.query_size, config.kv_size, config.kv_size]
    bias = checkpoint.vector([f"{name}.bias" for name in names], sizes) if config.qkv_bias else None
    output_bias = checkpoint.tensor(f"{prefix}o_proj.bias", hidden_size) if config.output_bias else None
    order = torch.tensor(gated_order(config), device=checkpoint.device)
    return GatedAttentionLayer(
        number=index - sum(other < index for other in config.recurrent_layers),
        norm=read_norm(checkpoint, config, f"{layer}input_layernorm"),
        projection=Projection(checkpoint.linear(names, sizes, hidden_size), order, bias),
        output=Projection(checkpoint.linear([f"{prefix}o_proj"], [hidden_size], config.query_size), bias=output_bias),
        mlp_norm=read_norm(checkpoint, config, f"{layer}post_attention_layernorm"),
        mlp=mlp,
        attention=LayerAttention(norms=_head_norms(checkpoint, config, prefix)),
    )


def gated_order(config: ArchConfig) -> list[int]:
    """Columns of q, k and v as a layer reads them: queries, keys, values, gate.

    Stored, a query is followed by the gate of its head. Queries and keys come in the order that kernels rotate.
    """
    head_dim, kv_start = config.head_dim, 2 * config.query_size
    both = torch.arange(kv_start).view(config.num_heads, 2, head_dim)
    keys, values = torch.arange(kv_start, kv_start + 2 * config.kv_size).chunk(2)
    queries, keys = (in_order(rows, config.rope.order) for rows in (both[:, 0].flatten(), keys))
    return torch.cat([queries, keys, values, both[:, 1].flatten()]).tolist()


def _head_norms(checkpoint: ModelCheckpoint, config: ArchConfig, prefix: str) -> HeadNorms:
    query, key = (_head_norm(checkpoint, config, f"{prefix}{part}_norm.weight") for part in "qk")
    return HeadNorms(query, key)


def _head_norm(checkpoint: ModelCheckpoint, config: ArchConfig, name: str) -> Tensor:
    return in_order(zero_centered(checkpoint.tensor(name, config.head_dim)).weight, config.rope.order)
