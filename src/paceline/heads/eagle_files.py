"""What the files of EAGLE heads share: SafeAILab's EAGLE-1/2 and EAGLE-3, SpecForge's, and the speculators layout.

They differ in the name of the one layer (`midlayer.` or `layers.0.`) and in their configs; the tensors are the same.
Sizes are read from the tensors: published configs are often those of another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.errors import WeightsError
from paceline.heads.checkpoint import Checkpoint, converted, number, plain_name, tensor_named
from paceline.heads.eagle import EagleConfig, EagleHead
from paceline.heads.rope_options import rope_options

MIDLAYER = "midlayer."
LISTED = "layers.0."
# Some trainers write these and no program needs them: a table of angles, and copies of the target's own weights.
NOT_NEEDED = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")


def renamed(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the names of our modules, and of its config the part that describes the layer."""
    prefix = MIDLAYER if any(plain_name(name).startswith(MIDLAYER) for name in checkpoint.tensors) else LISTED

    def module_name(name: str) -> str:
        name = plain_name(name)
        return MIDLAYER + name.removeprefix(prefix) if name.startswith(prefix) else name

    tensors = {module_name(name): value for name, value in checkpoint.tensors.items() if not name.endswith(NOT_NEEDED)}
    config = _layer_config(checkpoint.config)
    return Checkpoint(checkpoint.folder, config, tensors, lambda name: name.replace(MIDLAYER, prefix, 1))


def _layer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config that describes the layer: nested in speculators' files, the whole of others."""
    nested = config.get("transformer_layer_config")
    return dict(nested) if isinstance(nested, Mapping) else dict(config)


def shared_fields(named: Checkpoint) -> dict[str, Any]:
    """Fields of EagleConfig that every kind has, read from the tensors."""
    config, tensors = named.config, named.tensors
    q_rows = tensor_named(named, f"{MIDLAYER}self_attn.q_proj.weight").shape[0]
    k_rows = tensor_named(named, f"{MIDLAYER}self_attn.k_proj.weight").shape[0]
    head_dim = int(number(config, "head_dim", 0)) or q_rows // int(number(config, "num_attention_heads", 1))
    if not head_dim or q_rows % head_dim or k_rows % head_dim:
        raise WeightsError(f"{named.folder}: q_proj's {q_rows} and k_proj's {k_rows} rows are not heads of {head_dim}")
    return {
        "hidden_size": tensor_named(named, f"{MIDLAYER}post_attention_layernorm.weight").shape[0],
        "intermediate_size": tensor_named(named, f"{MIDLAYER}mlp.gate_proj.weight").shape[0],
        "num_heads": q_rows // head_dim,
        "num_kv_heads": k_rows // head_dim,
        "head_dim": head_dim,
        **rope_options(config, named.folder),
        "max_seq_len": int(number(config, "max_position_embeddings", 2048)),
        "rms_norm_eps": number(config, "rms_norm_eps", 1e-6),
        "fc_bias": "fc.bias" in tensors,
        "qkv_bias": f"{MIDLAYER}self_attn.q_proj.bias" in tensors,
        "output_bias": f"{MIDLAYER}self_attn.o_proj.bias" in tensors,
        "own_embeddings": "embed_tokens.weight" in tensors,
    }


def vocab_size_of(named: Checkpoint) -> int:
    """Tokens of the target, from the tensors where they tell."""
    for name in ("t2d", "embed_tokens.weight"):
        if name in named.tensors:
            return named.tensors[name].shape[0]
    vocab_size = named.config.get("vocab_size")
    if vocab_size is None:
        raise WeightsError(f"{named.folder}: t2d, embed_tokens or vocab_size must say how many tokens there are")
    return int(vocab_size)


def written_tensors(head: EagleHead, prefix: str, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The tensors of a head with the layer under the name `prefix`, in the dtype to write.

    A head of the whole vocabulary has no map of tokens: vLLM refuses the file of one that has.
    """
    maps = ("d2t", "t2d") if head.config.draft_vocab_size == head.config.vocab_size else ()
    return {
        prefix + name.removeprefix(MIDLAYER) if name.startswith(MIDLAYER) else name: converted(value, dtype)
        for name, value in head.state_dict().items()
        if name not in maps
    }


def llama_fields(config: EagleConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The one layer as a Llama config describes it."""
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": config.vocab_size,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else dict(config.rope_scaling),
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.qkv_bias,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
