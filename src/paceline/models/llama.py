"""Llama, and the wiring that Mistral, Qwen2 and Qwen3 share with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.errors import WeightsError
from paceline.layers.attention import HeadNorms
from paceline.layers.decoder_layer import NO_HEAD_NORMS, DecoderLayer
from paceline.layers.gemm_types import Linear
from paceline.models.checkpoint import Embedding, ModelCheckpoint
from paceline.models.config import ArchConfig, arch_config, unsupported_field
from paceline.models.decoder import DecoderModel

MODEL_TYPES = ("llama",)


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    return unsupported_field(config)


def config_from_hf(config: Any) -> ArchConfig:
    bias = bool(getattr(config, "attention_bias", False))
    return arch_config(config, qkv_bias=bias, output_bias=bias)


def load(checkpoint: ModelCheckpoint, config: ArchConfig) -> DecoderModel:
    """Read a model. Raises WeightsError that names a tensor which is missing, of another shape, or not used."""
    layers = [_layer(checkpoint, config, f"model.layers.{index}.") for index in range(config.num_layers)]
    embedding = checkpoint.embedding("model.embed_tokens", config.vocab_size, config.hidden_size)
    final_norm = checkpoint.tensor("model.norm.weight", config.hidden_size)
    lm_head = _lm_head(checkpoint, config, embedding)
    checkpoint.check_all_used()
    return DecoderModel(config, embedding, layers, final_norm, lm_head)


def _lm_head(checkpoint: ModelCheckpoint, config: ArchConfig, embedding: Embedding) -> Linear:
    """The embedding where the two are tied. A checkpoint may still store the LM head, if it is the same."""
    shape = config.vocab_size, config.hidden_size
    if not config.tie_word_embeddings:
        return checkpoint.linear(["lm_head"], [shape[0]], shape[1])
    if "lm_head.weight" not in checkpoint:
        return checkpoint.linear_of(embedding)
    stored = checkpoint.tensor("lm_head.weight", *shape)
    if not (isinstance(embedding, Tensor) and torch.equal(stored, embedding)):
        raise WeightsError("lm_head.weight differs from the embedding, and the config says that they are tied")
    return checkpoint.linear_of(embedding)


def _layer(checkpoint: ModelCheckpoint, config: ArchConfig, prefix: str) -> DecoderLayer:
    hidden_size, attention, mlp = config.hidden_size, f"{prefix}self_attn.", f"{prefix}mlp."
    qkv_names = [f"{attention}{part}_proj" for part in "qkv"]
    qkv_sizes = [config.query_size, config.kv_size, config.kv_size]
    gate_up = [f"{mlp}gate_proj", f"{mlp}up_proj"]
    biases = [f"{name}.bias" for name in qkv_names]
    return DecoderLayer(
        attention_norm=checkpoint.tensor(f"{prefix}input_layernorm.weight", hidden_size),
        qkv=checkpoint.linear(qkv_names, qkv_sizes, hidden_size),
        output=checkpoint.linear([f"{attention}o_proj"], [hidden_size], config.query_size),
        mlp_norm=checkpoint.tensor(f"{prefix}post_attention_layernorm.weight", hidden_size),
        gate_up=checkpoint.linear(gate_up, [config.intermediate_size] * 2, hidden_size),
        down=checkpoint.linear([f"{mlp}down_proj"], [hidden_size], config.intermediate_size),
        qkv_bias=checkpoint.vector(biases, qkv_sizes) if config.qkv_bias else None,
        output_bias=checkpoint.tensor(f"{attention}o_proj.bias", hidden_size) if config.output_bias else None,
        head_norms=_head_norms(checkpoint, config, attention) if config.qk_norm else NO_HEAD_NORMS,
    )


def _head_norms(checkpoint: ModelCheckpoint, config: ArchConfig, prefix: str) -> HeadNorms:
    query, key = (checkpoint.tensor(f"{prefix}{part}_norm.weight", config.head_dim) for part in "qk")
    return HeadNorms(query, key)
