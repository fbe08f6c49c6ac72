"""Writes DFlash heads as z-lab (`original`) and speculators publish them. SGLang and vLLM read both.

What readers take from different places is written in all of them, and nothing is left to their defaults, which differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import OptionError
from paceline.heads.block_attention import FULL, SLIDING
from paceline.heads.checkpoint import Provenance, converted, write_checkpoint
from paceline.heads.dflash import DFlashConfig, DFlashHead

ORIGINAL, SPECULATORS = "original", "speculators"


def save(
    head: DFlashHead, folder: str | Path, *, layout: str, provenance: Provenance, dtype: torch.dtype | None
) -> None:
    """Write a head. Raises OptionError for a reduced vocabulary that speculators' readers could not rebuild."""
    config = head.config
    stored = str(dtype or head.like.dtype).removeprefix("torch.")
    make = {ORIGINAL: _original_config, SPECULATORS: _speculators_config}[layout]
    write_checkpoint(folder, make(config, provenance, stored), _tensors(head, layout, dtype))


def _tensors(head: DFlashHead, layout: str, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """An output head of the target's own rows is left out; speculators' readers need it, so they get it."""
    state, config = head.state_dict(), head.config
    borrowed = not config.own_lm_head
    if borrowed and layout == ORIGINAL:
        state.pop("lm_head.weight", None)
    if layout == SPECULATORS and config.is_reduced and "lm_head.weight" not in state:
        raise OptionError("the layout speculators needs the output rows of a reduced vocabulary: bind_target() first")
    return {name: converted(value, dtype) for name, value in state.items()}


def _kind(config: DFlashConfig) -> str:
    if config.markov_rank or config.confidence_head:
        return "dspark"
    return "dflash2" if config.conv_kernel_size or config.selector_rank else "dflash"


def _layer_fields(config: DFlashConfig, dtype: str) -> dict[str, Any]:
    """The layers as a Qwen3 config describes them."""
    return {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else dict(config.rope_scaling),
        "max_position_embeddings": config.max_seq_len,
        "layer_types": list(config.layer_types) or [FULL] * config.num_layers,
        "sliding_window": config.sliding_window or None,
        "use_sliding_window": bool(config.sliding_window),
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }


def _variant_fields(config: DFlashConfig) -> dict[str, Any]:
    """What the variants add; absent where a head has none of it."""
    fields: dict[str, Any] = {}
    if config.conv_kernel_size:
        fields |= {"conv_kernel_size": config.conv_kernel_size, "conv_group_size": config.conv_group_size}
    if config.selector_rank:
        fields |= {"selector_rank": config.selector_rank, "selector_top_k": config.selector_top_k}
    if config.markov_rank or config.confidence_head:
        fields |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov_kind,
            "enable_confidence_head": config.confidence_head,
            "confidence_head_with_markov": config.confidence_reads_markov,
        }
    scale, multiplier, cap = config.input_embedding_scale, config.output_multiplier, config.logit_softcap
    fields |= {"input_embedding_scale": scale} if scale != 1 else {}
    fields |= {"output_multiplier": multiplier} if multiplier != 1 else {}
    return fields | ({"final_logit_softcapping": cap} if cap else {})


def _block_fields(config: DFlashConfig) -> dict[str, Any]:
    return {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.sample_from_anchor,
    }


def _original_config(config: DFlashConfig, provenance: Provenance, dtype: str) -> dict[str, Any]:
    kind = _kind(config)
    classes = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}
    inner = {
        **_block_fields(config),
        **_variant_fields(config),
        "target_layer_ids": [layer - 1 for layer in config.feature_layers],
        "projector_type": "dspark" if kind == "dspark" else "dflash",
    }
    causal = {} if config.causal is None else {"is_causal": config.causal}
    return {
        **_layer_fields(config, dtype),
        **causal,
        "architectures": [classes[kind]],
        "base_model_name_or_path": provenance.target,
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "dflash_config": inner if config.causal is None else {**inner, "causal": config.causal},
    }


def _causal_layers(config: DFlashConfig) -> dict[str, Any]:
    """Layers of a causal head: speculators masks only sliding layers causally, so full ones get a window for all rows.

    vLLM takes the same from sliding_window_non_causal, for all layers alike.
    """
    if not config.causal or config.sliding_window:
        return {"is_causal": True} if config.causal else {}
    window = config.max_seq_len + config.block_size
    sliding = {"layer_types": [SLIDING] * config.num_layers, "sliding_window": window, "use_sliding_window": True}
    return {**sliding, "is_causal": True}


def _speculators_config(config: DFlashConfig, provenance: Provenance, dtype: str) -> dict[str, Any]:
    kind = _kind(config)
    classes = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": config.max_draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        **_block_fields(config),
        **_variant_fields(config),
        "architectures": [classes[kind]],
        "speculators_model_type": kind,
        "transformer_layer_config": {**_layer_fields(config, dtype), **_causal_layers(config)},
        **({} if config.causal is None else {"is_causal": config.causal}),
        "aux_hidden_state_layer_ids": list(config.feature_layers),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "sliding_window_non_causal": not config.causal and not (config.causal is None and config.sliding_window),
        "torch_dtype": dtype,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": provenance.target, "architectures": list(provenance.architectures)},
        },
    }
