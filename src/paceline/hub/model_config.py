"""Sizes of a decoder, read from a Hugging Face config: the one place that knows the config keys and their fallbacks.

    decoder_sizes(config)                       a config.json as a dictionary, or a loaded config object
    gguf_config(architecture, metadata.get)     the metadata of a GGUF file under the keys of Hugging Face

Imports neither torch nor transformers, so that planning stays light.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import OptionError

Config = Mapping[str, Any]
DEFAULT_MAX_SEQ_LEN = 2048

# The GPT-2 generation of configs uses other keys for the same sizes.
GPT2_KEYS: Mapping[str, str] = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
}

GGUF_KEYS: Mapping[str, str] = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "sliding_window": "attention.sliding_window",
    "sliding_window_pattern": "attention.sliding_window_pattern",
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
    "v_head_dim": "attention.value_length_mla",
    "qk_rope_head_dim": "rope.dimension_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "n_shared_experts": "expert_shared_count",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "conv_L_cache": "shortconv.l_cache",
    "conv_kernel": "ssm.conv_kernel",
    "state_size": "ssm.state_size",
    "mamba_d_ssm": "ssm.inner_size",
    "mamba_n_heads": "ssm.time_step_rank",
    "mamba_n_groups": "ssm.group_count",
}


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """The sizes every decoder-only transformer has."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    vocab_size: int
    max_seq_len: int

    @property
    def kv_values_per_token(self) -> int:
        """Numbers the KV cache stores for one token of one sequence, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def decoder_sizes(config: Any, name: str = "this model", defaults: Mapping[str, int] | None = None) -> DecoderSizes:
    """The sizes of the text decoder a config describes.

    defaults: values that an architecture fixes in its code and leaves out of its configs.
    Raises OptionError where a required size is missing or negative.
    """
    reader = ConfigReader(config, name, defaults)
    hidden_size, num_heads = reader.require("hidden_size"), reader.require("num_attention_heads")
    return DecoderSizes(
        hidden_size=hidden_size,
        intermediate_size=reader.get("intermediate_size") or 4 * hidden_size,
        num_heads=num_heads,
        num_kv_heads=reader.get("num_key_value_heads") or num_heads,
        head_dim=reader.get("head_dim") or hidden_size // num_heads,
        num_layers=reader.length("layers_block_type", "hybrid_override_pattern") or reader.require("num_hidden_layers"),
        vocab_size=reader.require("vocab_size"),
        max_seq_len=reader.get("max_position_embeddings", "n_positions", "seq_length") or DEFAULT_MAX_SEQ_LEN,
    )


def text_config(config: Any) -> Config:
    """The part of a config that describes the text decoder, as a dictionary."""
    if not isinstance(config, Mapping):
        config = config.get_text_config().to_dict()
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


class ConfigReader:
    """Reads whole numbers from the text decoder's config, under today's keys or GPT-2's."""

    def __init__(self, config: Any, name: str, defaults: Mapping[str, int] | None = None) -> None:
        self.config = text_config(config)
        self._name = name
        self._defaults = defaults or {}

    def get(self, *keys: str) -> int:
        """The first of these keys that holds a number, else the default of the first, else 0."""
        for key in keys:
            for spelling in (key, GPT2_KEYS.get(key, key)):
                value = self.config.get(spelling)
                if isinstance(value, int) and not isinstance(value, bool):
                    return self._checked(spelling, value)
        return self._defaults.get(keys[0], 0)

    def length(self, *keys: str) -> int:
        """How many layers the first of these lists has; 0: there is none. Some configs say it in no other way."""
        lists = (self.config.get(key) for key in keys)
        return next((len(value) for value in lists if isinstance(value, list | tuple | str)), 0)

    def require(self, key: str) -> int:
        value = self.get(key)
        if value == 0:
            raise OptionError(f"{self._name}: the config does not give {key}, so the model cannot be sized")
        return value

    def _checked(self, key: str, value: int) -> int:
        if value < 0:
            raise OptionError(f"{self._name}: the config says {key} = {value}, which no model can have")
        return value


def gguf_config(architecture: str, metadata: Callable[[str], Any]) -> dict[str, Any]:
    """The sizes in a GGUF file's metadata, under the keys of a Hugging Face config."""
    values = {key: metadata(f"{architecture}.{gguf_key}") for key, gguf_key in GGUF_KEYS.items()}
    return {key: value for key, value in values.items() if isinstance(value, int)}
