"""Keys of a Hugging Face config that GGUF files of some architectures have beside Llama's.

Each function takes the config that Llama's keys give and returns the architecture's own. Where a file lacks a key, the
value is the one that llama.cpp takes.
"""

from __future__ import annotations

from typing import Any

from paceline.hub.gguf_fields import GgufFields

Config = dict[str, Any]
SLIDING, FULL = "sliding_attention", "full_attention"
# Gemma's scale of attention is in no key; the largest models of two generations differ, and layers tell them.
GEMMA2_27B_LAYERS, GEMMA3_27B_LAYERS = 46, 62


def plain_config(fields: GgufFields, base: Config) -> Config:
    """Every token sees all before it."""
    _refuse_windows(fields, base)
    return base


def gemma2_config(fields: GgufFields, base: Config) -> Config:
    """Windows in every other layer, unless the file says otherwise."""
    window = int(fields.number("attention.sliding_window", 4096))
    return base | _gelu() | {
        **_windows(fields, base, window, period=2),
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0) or None,
        "query_pre_attn_scalar": _attention_scalar(base, GEMMA2_27B_LAYERS),
    }  # fmt: skip


def gemma3_config(fields: GgufFields, base: Config) -> Config:
    """Windows in five layers of six, unless the file says otherwise. Only layers without one have a scaled rope."""
    window = int(fields.number("attention.sliding_window", 0))
    sliding = {"rope_type": "default", "rope_theta": float(fields.number("rope.freq_base_swa", 10000.0))}
    own = {name: value for name, value in base.items() if name != "rope_theta"}
    return own | _gelu() | {
        **_windows(fields, base, window, period=6),
        "rope_parameters": {FULL: base["rope_parameters"], SLIDING: sliding},
        "attn_logit_softcapping": None,
        "final_logit_softcapping": fields.number("final_logit_softcapping", 0.0) or None,
        "query_pre_attn_scalar": _attention_scalar(base, GEMMA3_27B_LAYERS),
    }  # fmt: skip


def qwen3moe_config(fields: GgufFields, base: Config) -> Config:
    _refuse_windows(fields, base)
    return base | {
        "num_experts": fields.required("expert_count"),
        "num_experts_per_tok": fields.required("expert_used_count"),
        "moe_intermediate_size": fields.required("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def phi3_config(fields: GgufFields, base: Config) -> Config:
    """Every layer has the window, as in transformers."""
    return base | {"sliding_window": int(fields.number("attention.sliding_window", 0)) or None}


def starcoder2_config(fields: GgufFields, base: Config) -> Config:
    _refuse_windows(fields, base)
    epsilon = float(f"{fields.required('attention.layer_norm_epsilon'):.6g}")
    return base | {"norm_epsilon": epsilon, "use_bias": True, "hidden_act": "gelu_pytorch_tanh"}


def _refuse_windows(fields: GgufFields, base: Config) -> None:
    """Raise WeightsError where layers see less than the whole text."""
    window = fields.number("attention.sliding_window", 0)
    if 0 < window < base["max_position_embeddings"]:
        raise fields.refused(f"{fields.architecture}.attention.sliding_window", window)


def _windows(fields: GgufFields, base: Config, window: int, period: int) -> Config:
    """Every layer by its kind. A window of 0: none has one."""
    count = base["num_hidden_layers"]
    pattern = fields.of_architecture("attention.sliding_window_pattern", period)
    if isinstance(pattern, list) and len(pattern) == count:
        sliding = [bool(value) for value in pattern]
    elif isinstance(pattern, int):
        sliding = [pattern == 0 or index % pattern < pattern - 1 for index in range(count)]
    else:
        raise fields.refused(f"{fields.architecture}.attention.sliding_window_pattern", pattern)
    types = [SLIDING if window and is_sliding else FULL for is_sliding in sliding]
    return {"sliding_window": window or base["max_position_embeddings"], "layer_types": types}


def _attention_scalar(base: Config, layers_of_27b: int) -> int:
    by_width = base["num_hidden_layers"] == layers_of_27b
    return int(base["hidden_size"] // base["num_attention_heads"] if by_width else base["head_dim"])


def _gelu() -> Config:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
