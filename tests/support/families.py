"""Tiny random checkpoints of every causal language model that the installed transformers has, and variants of them.

A family is built by writing small sizes over the defaults of its config; what that leaves inconsistent is put right in
CHANGES. Variants change one thing: windows, biases, alibi, ropes, tied heads, experts, orders of layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.support.tiny import byte_tokenizer

VOCABULARY = 264
SCALE = 0.2  # standard deviation of matrices: decided distributions, and no chaos
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "attention_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 512),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("v_head_dim", "head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "index_topk"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "mamba_n_groups", "encoder_layers"), 1),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "linear_num_key_heads", "index_n_heads"), 2),
    **dict.fromkeys(("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads", "encoder_attention_heads"), 4),
    "vocab_size": VOCABULARY,
    "sliding_window": 16,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
ALWAYS = ("bos_token_id", "eos_token_id", "pad_token_id")  # also where a config has none
KEPT_SCALES = ("A_log", "dt_bias", ".D", "norm", "time_", "lambda", "sinks", "scale")

FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"
MLA: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 8}
SEQ2SEQ: dict[str, Any] = {"is_decoder": True, "is_encoder_decoder": False, "encoder_layers": 2, "decoder_layers": 2}
ENCODER: dict[str, Any] = {"is_decoder": True}
HYBRID: dict[str, Any] = {"layer_types": [LINEAR, FULL]}


@dataclass(frozen=True)
class Variant:
    """One checkpoint. runner: which runner is asked for; None: as a user who says nothing."""

    model_type: str
    name: str = ""
    changes: dict[str, Any] = field(default_factory=dict)
    runner: str | None = None

    @property
    def id(self) -> str:
        return f"{self.model_type}-{self.name}" if self.name else self.model_type


# What a family needs beyond small sizes.
CHANGES: dict[str, dict[str, Any]] = {}


def causal_types() -> list[str]:
    """Every model type of transformers' causal language models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_family_config(model_type: str, changes: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    default = kind()
    settings = _small(default)
    for name in kind.sub_configs:
        part = getattr(default, name, None)
        if part is not None:
            settings[name] = _small(part)
    return kind(**_merged(_merged(settings, CHANGES.get(model_type, {})), changes))


def _small(config: Any) -> dict[str, Any]:
    """Small values for the sizes that a config has."""
    sizes, aliases = config.to_dict(), type(config).attribute_map
    known = {name: value for name, value in SIZES.items() if name in sizes and name not in aliases}
    return {name: value for name, value in known.items() if sizes[name] is not None or name in ALWAYS}


def _merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Changes over settings, also inside configs of parts. None takes a setting away."""
    merged = {name: value for name, value in settings.items() if name not in changes}
    for name, value in changes.items():
        inner = settings.get(name)
        if isinstance(value, dict) and isinstance(inner, dict) and "config" in name:
            merged[name] = _merged(inner, value)
        elif value is not None:
            merged[name] = value
    return merged


def tiny_family(variant: Variant, seed: int = 0) -> Any:
    """The model of a variant, with weights of a scale that makes decided distributions."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = tiny_family_config(variant.model_type, variant.changes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                _rescale(name, weight)
        return model


def _rescale(name: str, weight: torch.Tensor) -> None:
    if any(part in name for part in KEPT_SCALES):
        return
    if weight.ndim > 1:
        weight.normal_(0.0, SCALE)
    else:
        weight.add_(torch.randn_like(weight) * 0.1)


def write_family(variant: Variant, folder: Path, seed: int = 0) -> Path:
    """The checkpoint of a variant with a byte tokenizer, as a user finds one on disk."""
    tiny_family(variant, seed).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
