"""What a Llama-like model is made of, read from its config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.heads.attention import rotary_frequencies

FAMILY = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers a pass needs."""

    layers: int
    width: int
    inner: int
    heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    head_norm: bool  # Qwen3 norms queries and keys head by head
    tied: bool
    max_seq_len: int

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.num_kv_heads

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim


def is_native(config: Any) -> bool:
    """Whether this config is one of the family, with full attention everywhere and nothing unusual inside."""
    if getattr(config, "model_type", None) not in FAMILY or getattr(config, "hidden_act", "silu") != "silu":
        return False
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if kinds != {"full_attention"} or (window and not getattr(config, "layer_types", None)):
        return False
    quantization = getattr(config, "quantization_config", None) is not None
    partial = float(_rope(config).get("partial_rotary_factor", 1.0)) != 1.0
    return not (quantization or partial or getattr(config, "mlp_bias", False))


def _rope(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


def shape_of(config: Any) -> Shape:
    heads = config.num_attention_heads
    return Shape(
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        inner=config.intermediate_size,
        heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        vocab=config.vocab_size,
        eps=float(config.rms_norm_eps),
        head_norm=config.model_type == "qwen3",
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        max_seq_len=int(config.max_position_embeddings),
    )


def rotary_table(config: Any, length: int, device: torch.device) -> Tensor:
    """Cosines and sines of every position: float32 [length, 2, head size / 2]."""
    frequencies, scale = _turning(config)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies[None]
    return torch.stack([angles.cos() * scale, angles.sin() * scale], dim=1).to(device)


def _turning(config: Any) -> tuple[Tensor, float]:
    """How fast each pair of values turns with the position, and what it is scaled by. [head size / 2]"""
    rope = _rope(config)
    if rope.get("rope_type") == "default":
        return rotary_frequencies(shape_of(config).head_dim, float(rope["rope_theta"])), 1.0
    # transformers knows all the variants; importing its models takes a second, so only where one is needed.
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(config)
    return rotary.inv_freq.float(), float(getattr(rotary, "attention_scaling", 1.0))
