"""GPT-NeoX and Pythia: layer norms, biases, and q, k and v stored head by head; attention and MLP beside each other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from paceline.layers.decoder_layer import DecoderLayer
from paceline.models.checkpoint import ModelCheckpoint
from paceline.models.config import ArchConfig, NormKind, arch_config, unsupported_field
from paceline.models.decoder import DecoderModel
from paceline.models.llama import read_model, read_norm, read_plain_mlp, rotatable

MODEL_TYPES = ("gpt_neox",)
PREFIXES = {
    "gpt_neox.embed_in.": "model.embed_tokens.",
    "gpt_neox.final_layer_norm.": "model.norm.",
    "gpt_neox.": "model.",
    "embed_out.": "lm_head.",
}


def unsupported(config: Any) -> str | None:
    """Why a model with this Hugging Face config cannot run here; None: it can."""
    return unsupported_field(config, ("partial_rotary_factor", "rope_interleaved"))


def config_from_hf(config: Any) -> ArchConfig:
    bias = bool(config.attention_bias)
    sizes = arch_config(config, qkv_bias=bias, output_bias=bias, eps="layer_norm_eps")
    return replace(sizes, norm_kind=NormKind.LAYER, mlp_bias=True, parallel=bool(config.use_parallel_residual))


def load(checkpoint: ModelCheckpoint, config: ArchConfig) -> DecoderModel:
    """Read a model. Raises WeightsError that names a tensor which is missing, of another shape, or not used."""
    renamed = checkpoint.renamed(PREFIXES, dropped=())
    return read_model(renamed, config, [_layer(renamed, config, index) for index in range(config.num_layers)])


def _layer(checkpoint: ModelCheckpoint, config: ArchConfig, index: int) -> DecoderLayer:
    prefix, size = f"model.layers.{index}.", config.hidden_size
    qkv, output, mlp = (f"{prefix}{name}" for name in ("attention.query_key_value", "attention.dense", "mlp.dense_"))
    return DecoderLayer(
        attention_norm=read_norm(checkpoint, config, f"{prefix}input_layernorm"),
        qkv=checkpoint.linear_of(_by_kind(checkpoint.tensor(f"{qkv}.weight", 3 * size, size), config)),
        output=checkpoint.linear([output], [size], size),
        mlp_norm=read_norm(checkpoint, config, f"{prefix}post_attention_layernorm"),
        mlp=read_plain_mlp(checkpoint, config, f"{mlp}h_to_4h", f"{mlp}4h_to_h"),
        qkv_bias=_by_kind(checkpoint.tensor(f"{qkv}.bias", 3 * size), config) if config.qkv_bias else None,
        output_bias=checkpoint.tensor(f"{output}.bias", size) if config.output_bias else None,
        parallel=config.parallel,
    )


def _by_kind(rows: Tensor, config: ArchConfig) -> Tensor:
    """Rows of q, k and v of one head after another -> all of q, then all of k, then all of v."""
    by_head = rows.reshape(config.num_heads, 3, config.head_dim, *rows.shape[1:])
    return rotatable(by_head.transpose(0, 1).flatten(0, 2), config)
