"""Llama, and the wiring that other architectures share with it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.layers.attention import HeadNorms, LayerAttention
from paceline.layers.decoder_layer import DecoderLayer
from paceline.layers.feed_forward import GatedMlp, Mlp, PlainMlp
from paceline.layers.gemm_types import Linear
from paceline.layers.norm import Norm, zero_centered
from paceline.layers.residual import ResidualAdd
from paceline.layers.rope import in_order
from paceline.models.checkpoint import Embedding, ModelCheckpoint
from paceline.models.config import ArchConfig, NormKind, arch_config, unsupported_field
from paceline.models.decoder import DecoderModel, Layer

LOG = logging.getLogger("paceline")
MODEL_TYPES = ("llama",)


@dataclass(frozen=True, slots=True)
class LayerNames:
    """What a checkpoint calls the parts of a layer. None: its layers have no such part."""

    attention_norm: str | None = "input_layernorm"
    attention_post_norm: str | None = None  # of what attention adds to the residual stream
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")  # or one name, where they are stored as one
    output: str = "o_proj"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"


LLAMA_NAMES = LayerNames()


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    return unsupported_field(config, ("mlp_bias",))


def config_from_hf(config: Any) -> ArchConfig:
    bias = bool(getattr(config, "attention_bias", False))
    return arch_config(config, qkv_bias=bias, output_bias=bias)


def load(checkpoint: ModelCheckpoint, config: ArchConfig) -> DecoderModel:
    """Read a model. Raises WeightsError that names a tensor which is missing, of another shape, or not used."""
    return read_model(checkpoint, config, [read_layer(checkpoint, config, index) for index in range(config.num_layers)])


def read_model(
    checkpoint: ModelCheckpoint, config: ArchConfig, layers: Sequence[Layer], final_norm: str = "model.norm"
) -> DecoderModel:
    """A model of these layers: read what is before and after them, and see that nothing is left unread."""
    embedding = checkpoint.embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
    norm, lm_head = read_norm(checkpoint, config, final_norm), _lm_head(checkpoint, config, embedding)
    bias = checkpoint.tensor("lm_head.bias", config.vocab_size) if config.lm_head_bias else None
    checkpoint.check_all_used()
    into, out_of = config.embedding_multiplier, config.logits_multiplier
    return DecoderModel(
        config,
        embedding,
        layers,
        norm,
        lm_head,
        bias,
        scale_embedding=None if into == 1.0 else lambda rows: rows * into,
        scale_logits=None if out_of == 1.0 else lambda logits: logits * out_of,
    )


def _lm_head(checkpoint: ModelCheckpoint, config: ArchConfig, embedding: Embedding) -> Linear:
    """The embedding where the two are tied. One that is stored beside it and differs is used, as transformers does."""
    shape = config.vocab_size, config.hidden_size
    if not config.tie_word_embeddings:
        return checkpoint.linear(["lm_head"], [shape[0]], shape[1])
    if "lm_head.weight" not in checkpoint:
        return checkpoint.linear_of(embedding)
    stored = checkpoint.tensor("lm_head.weight", *shape)
    if isinstance(embedding, Tensor) and torch.equal(stored, embedding):
        return checkpoint.linear_of(embedding)
    LOG.warning("lm_head.weight is used as it is stored: it differs from the embedding that the config ties it to")
    return checkpoint.linear(["lm_head"], [shape[0]], shape[1])


def read_layer(
    checkpoint: ModelCheckpoint,
    config: ArchConfig,
    index: int,
    names: LayerNames = LLAMA_NAMES,
    mlp: Mlp | None = None,
) -> DecoderLayer:
    """Read one layer. mlp: its MLP, where that is of another kind than a gated one."""
    prefix = f"model.layers.{index}."
    attention, output = f"{prefix}self_attn.", f"{prefix}self_attn.{names.output}"
    qkv = [f"{attention}{name}" for name in names.qkv]

    def norm(name: str | None) -> Norm | None:
        return None if name is None else read_norm(checkpoint, config, prefix + name)

    return DecoderLayer(
        attention_norm=norm(names.attention_norm),
        qkv=_qkv(checkpoint, config, qkv),
        output=checkpoint.linear([output], [config.hidden_size], config.query_size),
        mlp_norm=norm(names.mlp_norm),
        mlp=mlp or read_gated_mlp(checkpoint, config, f"{prefix}mlp.", names),
        qkv_bias=_qkv_bias(checkpoint, config, qkv) if config.qkv_bias else None,
        output_bias=checkpoint.tensor(f"{output}.bias", config.hidden_size) if config.output_bias else None,
        attention=_attention(checkpoint, config, index),
        attention_add=ResidualAdd(norm(names.attention_post_norm), config.residual_multiplier),
        mlp_add=ResidualAdd(norm(names.mlp_post_norm), config.residual_multiplier),
        parallel=config.parallel,
    )


def read_norm(checkpoint: ModelCheckpoint, config: ArchConfig, name: str) -> Norm:
    """A norm of hidden states, of the kind that the model has."""
    weight = checkpoint.tensor(f"{name}.weight", config.hidden_size)
    if config.norm_kind is NormKind.ZERO_CENTERED:
        return zero_centered(weight)
    if config.norm_kind is NormKind.RMS:
        return Norm(weight)
    bias = f"{name}.bias"
    return Norm(weight, checkpoint.tensor(bias, config.hidden_size) if bias in checkpoint else None, centers=True)


def read_gated_mlp(
    checkpoint: ModelCheckpoint, config: ArchConfig, prefix: str, names: LayerNames = LLAMA_NAMES
) -> GatedMlp:
    """Read a gated MLP; gate and up may be stored as one."""
    gate_up, down = [prefix + name for name in names.gate_up], prefix + names.down
    sizes = [2 * config.intermediate_size // len(gate_up)] * len(gate_up)
    biases = [f"{name}.bias" for name in gate_up]
    return GatedMlp(
        checkpoint.linear(gate_up, sizes, config.hidden_size),
        checkpoint.linear([down], [config.hidden_size], config.intermediate_size),
        config.activation,
        checkpoint.vector(biases, sizes) if config.mlp_bias else None,
        checkpoint.tensor(f"{down}.bias", config.hidden_size) if config.mlp_bias else None,
    )


def read_plain_mlp(checkpoint: ModelCheckpoint, config: ArchConfig, up: str, down: str) -> PlainMlp:
    """Read an MLP of two linear layers with an activation between them, by their names."""
    return PlainMlp(
        checkpoint.linear([up], [config.intermediate_size], config.hidden_size),
        checkpoint.linear([down], [config.hidden_size], config.intermediate_size),
        config.activation,
        checkpoint.tensor(f"{up}.bias", config.intermediate_size) if config.mlp_bias else None,
        checkpoint.tensor(f"{down}.bias", config.hidden_size) if config.mlp_bias else None,
    )


def _qkv(checkpoint: ModelCheckpoint, config: ArchConfig, names: list[str]) -> Linear:
    """q, k and v as one linear layer, the values of each head in the order that kernels rotate."""
    sizes = config.qkv_sizes if len(names) > 1 else [sum(config.qkv_sizes)]
    if config.rope.order is None:
        return checkpoint.linear(names, sizes, config.hidden_size)
    weights = [checkpoint.tensor(f"{name}.weight", size, config.hidden_size) for name, size in zip(names, sizes)]
    return checkpoint.linear_of(rotatable(torch.cat(weights), config))


def _qkv_bias(checkpoint: ModelCheckpoint, config: ArchConfig, names: list[str]) -> Tensor:
    sizes = config.qkv_sizes if len(names) > 1 else [sum(config.qkv_sizes)]
    return rotatable(checkpoint.vector([f"{name}.bias" for name in names], sizes), config)


def rotatable(qkv: Tensor, config: ArchConfig) -> Tensor:
    """Rows of q, k and v: those of queries and keys in the order that kernels rotate."""
    if config.rope.order is None:
        return qkv
    rotated = config.query_size + config.kv_size
    return torch.cat([in_order(qkv[:rotated], config.rope.order), qkv[rotated:]])


def _attention(checkpoint: ModelCheckpoint, config: ArchConfig, index: int) -> LayerAttention:
    attention = config.attention(index)
    if not config.qk_norm:
        return attention
    return replace(attention, norms=_head_norms(checkpoint, config, f"model.layers.{index}.self_attn."))


def _head_norms(checkpoint: ModelCheckpoint, config: ArchConfig, prefix: str) -> HeadNorms:
    query, key = (checkpoint.tensor(f"{prefix}{part}_norm.weight", config.head_dim) for part in "qk")
    if config.norm_kind is NormKind.ZERO_CENTERED:
        query, key = (zero_centered(weight).weight for weight in (query, key))
    return HeadNorms(in_order(query, config.rope.order), in_order(key, config.rope.order))
