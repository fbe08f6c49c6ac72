"""Architectures whose GGUF files run as they are.

A further one is an entry of ARCHITECTURES: what its files call the tensors of a layer, and a function for the keys of
its config that Llama does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.hub.gguf_configs import (
    gemma2_config,
    gemma3_config,
    phi3_config,
    plain_config,
    qwen3moe_config,
    starcoder2_config,
)
from paceline.hub.gguf_fields import GgufFields

Config = dict[str, Any]
# What files call the parts of a layer -> what Hugging Face calls them.
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
MLP_NORM = {"ffn_norm": "post_attention_layernorm"}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
PHI3_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",  # gate and up
    "ffn_down": "mlp.down_proj",
}
EXPERTS = {
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
}
LLAMA = ATTENTION | MLP_NORM | MLP
QKV = frozenset({"attn_q", "attn_k", "attn_v"})


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """One architecture, as llama.cpp's converter writes it.

    label              its name in the documents
    model_type         Hugging Face's name of it
    parts              the weights of a layer by the file's names; `*` in Hugging Face's name: experts one by one, which
                       the file has stacked
    biased             the parts that have a bias, the last norm among them as `output_norm`
    config             the config of Llama -> its own
    optional_bias      attention may have biases, in every layer or in none
    interleaved_rope   the two values of a rotary pair lie side by side
    frequency_factors  a tensor may say what the rope's frequencies are divided by
    added_to_norms     what the file's norms are above Hugging Face's
    """

    label: str
    class_name: str
    model_type: str
    parts: Mapping[str, str]
    biased: frozenset[str] = frozenset()
    config: Callable[[GgufFields, Config], Config] = plain_config
    optional_bias: bool = False
    interleaved_rope: bool = False
    frequency_factors: bool = False
    added_to_norms: float = 0.0


ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture(
        "Llama",
        "LlamaForCausalLM",
        "llama",
        LLAMA,
        optional_bias=True,
        interleaved_rope=True,
        frequency_factors=True,
    ),
    "qwen2": GgufArchitecture("Qwen2", "Qwen2ForCausalLM", "qwen2", LLAMA, QKV, frequency_factors=True),
    "qwen3": GgufArchitecture("Qwen3", "Qwen3ForCausalLM", "qwen3", LLAMA | HEAD_NORMS, frequency_factors=True),
    "qwen3moe": GgufArchitecture(
        "Qwen3-MoE",
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        ATTENTION | HEAD_NORMS | MLP_NORM | {"ffn_gate_inp": "mlp.gate"} | EXPERTS,
        config=qwen3moe_config,
    ),
    "gemma2": GgufArchitecture(
        "Gemma 2",
        "Gemma2ForCausalLM",
        "gemma2",
        ATTENTION | FOUR_NORMS | MLP,
        config=gemma2_config,
        added_to_norms=1.0,
    ),
    "gemma3": GgufArchitecture(
        "Gemma 3",
        "Gemma3ForCausalLM",
        "gemma3_text",
        ATTENTION | HEAD_NORMS | FOUR_NORMS | MLP,
        config=gemma3_config,
        added_to_norms=1.0,
    ),
    "phi3": GgufArchitecture("Phi-3", "Phi3ForCausalLM", "phi3", PHI3_PARTS | MLP_NORM, config=phi3_config),
    "starcoder2": GgufArchitecture(
        "StarCoder2",
        "Starcoder2ForCausalLM",
        "starcoder2",
        ATTENTION | MLP_NORM | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        biased=frozenset({*ATTENTION, "ffn_norm", "ffn_up", "ffn_down", "output_norm"}),
        config=starcoder2_config,
    ),
}
MODEL_TYPES: Mapping[str, str] = {name: architecture.model_type for name, architecture in ARCHITECTURES.items()}
# Experts are unpacked on GPUs, see quantization/gguf.py.
PACKED_ON_GPUS = frozenset(
    architecture.model_type
    for architecture in ARCHITECTURES.values()
    if not any("*" in name for name in architecture.parts.values())
)
