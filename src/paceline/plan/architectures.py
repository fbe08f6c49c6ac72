"""What an architecture fixes in its code and leaves out of its configs. An architecture is a row, not a class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

# Types of layers, as configs name them.
FULL, SLIDING, RECURRENT, CONV = "full_attention", "sliding_attention", "linear_attention", "conv"
BOTH, MLP_ALONE, MOE_ALONE = "hybrid", "mlp", "moe"  # attention beside a recurrent mixer; nothing but an MLP


@dataclass(frozen=True, slots=True)
class Architecture:
    """Biases, norms and wiring of an architecture.

    stated_out_bias  whether `attention_bias` of the config is about the attention's output too
    wide_norms       norms of queries and keys are over all heads at once
    output_gate      attention has a gate as wide as its queries
    sinks            every head has one more logit
    router_bias      the router has one number more for each expert
    expert_bias      experts have biases
    one_block        a layer is a mixer or an MLP, not one after the other
    pattern          of every so many layers the last is full attention and the others are of type `others`; -1: none is
    """

    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    stated_out_bias: bool = True
    mlp_bias: bool = False
    head_bias: bool = False
    norms: int = 2
    norm_bias: bool = False
    query_key_norms: bool = False
    wide_norms: bool = False
    output_gate: bool = False
    sinks: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    learned_positions: bool = False
    tied_embeddings: bool = False
    # The intermediate_size of Qwen's first generation counts gate and up together.
    mlp_halved: bool = False
    one_block: bool = False
    pattern: int = 0
    others: str = SLIDING
    defaults: Mapping[str, int] = field(default_factory=dict)


_LLAMA = Architecture()
_BIASED = Architecture(gated=False, qkv_bias=True, out_bias=True, mlp_bias=True, norm_bias=True)
_GEMMA3 = Architecture(
    norms=4,
    query_key_norms=True,
    tied_embeddings=True,
    pattern=6,
    defaults={"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
)
_GLM = Architecture(stated_out_bias=False)
_DELTA_NET = Architecture(query_key_norms=True, output_gate=True, pattern=4, others=RECURRENT)
_LATENT = Architecture(router_bias=True)
_STATE = Architecture(
    norms=1,
    tied_embeddings=True,
    one_block=True,
    pattern=-1,
    others=RECURRENT,
    defaults={"num_attention_heads": 1},
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "ministral": _LLAMA,
    "ministral3": _LLAMA,
    "mixtral": _LLAMA,
    "phi3": _LLAMA,
    "phimoe": replace(_LLAMA, norm_bias=True),
    "granite": _LLAMA,
    "granitemoe": Architecture(tied_embeddings=True),
    "granitemoeshared": _LLAMA,
    "granitemoehybrid": replace(_LLAMA, others=RECURRENT),
    "arcee": Architecture(gated=False),
    "seed_oss": Architecture(qkv_bias=True, stated_out_bias=False),
    "smollm3": Architecture(tied_embeddings=True),
    "qwen": Architecture(qkv_bias=True, mlp_halved=True),
    "qwen2": Architecture(qkv_bias=True),
    "qwen2_moe": Architecture(qkv_bias=True),
    "qwen3": Architecture(query_key_norms=True),
    "qwen3_moe": Architecture(query_key_norms=True),
    "qwen3_next": _DELTA_NET,
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5": _DELTA_NET,
    "qwen3_5_moe": _DELTA_NET,
    "qwen3_5_moe_text": _DELTA_NET,
    "gemma": Architecture(tied_embeddings=True),
    "gemma2": Architecture(norms=4, tied_embeddings=True, pattern=2),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gpt2": replace(_BIASED, learned_positions=True, tied_embeddings=True),
    "gpt_neox": _BIASED,
    "gpt_oss": Architecture(sinks=True, router_bias=True, expert_bias=True, pattern=2),
    "phi": replace(_BIASED, norms=1, head_bias=True),
    "starcoder2": replace(_BIASED, tied_embeddings=True),
    "olmo": replace(_LLAMA, norms=0),
    "olmo2": Architecture(query_key_norms=True, wide_norms=True),
    "olmo3": Architecture(query_key_norms=True, wide_norms=True, pattern=4),
    "olmoe": Architecture(query_key_norms=True, wide_norms=True),
    "exaone4": Architecture(query_key_norms=True),
    "hunyuan_v1_dense": Architecture(query_key_norms=True),
    "cohere": replace(_LLAMA, norms=1, tied_embeddings=True),
    "cohere2": replace(_LLAMA, norms=1, tied_embeddings=True, pattern=4),
    "glm": _GLM,
    "glm4": replace(_GLM, norms=4),
    "glm4_moe": replace(_GLM, router_bias=True),
    "glm4_moe_lite": _LATENT,
    "dots1": Architecture(query_key_norms=True, router_bias=True),
    "ernie4_5": _LLAMA,
    "deepseek_v2": Architecture(),
    "deepseek_v3": _LATENT,
    "lfm2": Architecture(query_key_norms=True, tied_embeddings=True, others=CONV),
    "lfm2_moe": Architecture(query_key_norms=True, tied_embeddings=True, router_bias=True, others=CONV),
    "mamba": _STATE,
    "falcon_mamba": _STATE,
    "mamba2": replace(_STATE, tied_embeddings=False),
    "bamba": Architecture(others=RECURRENT),
    "falcon_h1": Architecture(pattern=-1, others=BOTH),
    "nemotron_h": Architecture(gated=False, norms=1, one_block=True, others=RECURRENT, router_bias=True),
    "jamba": Architecture(others=RECURRENT),
}
