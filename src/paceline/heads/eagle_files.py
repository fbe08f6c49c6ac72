"""Files of EAGLE heads: SafeAILab's EAGLE-1/2 and EAGLE-3, SpecForge's, and the speculators layout.

They differ in what the one layer is called (`midlayer.` or `layers.0.`) and where the config says what; the tensors are
the same. Sizes are counted from the tensors: published configs are often those of another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import OptionError, WeightsError
from paceline.heads.checkpoint import Checkpoint, install, number, tensor_named, write_checkpoint
from paceline.heads.eagle import EAGLE_1, EAGLE_3, USUAL_FEATURES, EagleConfig, EagleHead

OURS = "midlayer."
LISTED = "layers.0."
LAYOUTS = ("original", "speculators")
# Written by some trainers and needed by nobody: a table of angles, and copies of the target's own weights.
NOT_NEEDED = ("rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a config says about the target a head was trained for."""

    target: str = ""
    architectures: tuple[str, ...] = ("LlamaForCausalLM",)
    num_draft_tokens: int = 5


# --- reading ----------------------------------------------------------------------------------------------------------


def build_eagle(checkpoint: Checkpoint, kind: str) -> EagleHead:
    """The head a checkpoint holds. Raises WeightsError naming the tensor that does not fit."""
    prefix = OURS if any(plain_name(name).startswith(OURS) for name in checkpoint.tensors) else LISTED
    known = {_ours(name, prefix): value for name, value in checkpoint.tensors.items() if not name.endswith(NOT_NEEDED)}
    called = partial(_theirs, prefix=prefix)
    named = Checkpoint(checkpoint.folder, layer_config(checkpoint.config), known, called)
    config = _eagle3_config(named, checkpoint.config) if kind == EAGLE_3 else _eagle1_config(named)
    if kind == EAGLE_3:
        _complete_vocabulary(named, config)
    head = EagleHead(config)
    install(head, named)
    if kind == EAGLE_3:
        _check_vocabulary(head, checkpoint.folder)
    return head.eval()


def plain_name(name: str) -> str:
    """A tensor's name without the wrapper some trainers save around the head."""
    return name.removeprefix("model.")


def _ours(name: str, prefix: str) -> str:
    name = plain_name(name)
    return OURS + name.removeprefix(prefix) if name.startswith(prefix) else name


def _theirs(name: str, prefix: str) -> str:
    return name.replace(OURS, prefix, 1)


def layer_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config that describes the layer: nested in speculators' files, the whole of others."""
    nested = config.get("transformer_layer_config")
    return dict(nested) if isinstance(nested, Mapping) else dict(config)


def _shape_fields(named: Checkpoint) -> dict[str, Any]:
    """What both kinds have, counted from the tensors."""
    config, tensors = named.config, named.tensors
    width = tensor_named(named, f"{OURS}post_attention_layernorm.weight").shape[0]
    q_rows = tensor_named(named, f"{OURS}self_attn.q_proj.weight").shape[0]
    k_rows = tensor_named(named, f"{OURS}self_attn.k_proj.weight").shape[0]
    head_dim = int(number(config, "head_dim", 0)) or q_rows // int(number(config, "num_attention_heads", 1))
    if not head_dim or q_rows % head_dim or k_rows % head_dim:
        raise WeightsError(f"{named.folder}: q_proj's {q_rows} and k_proj's {k_rows} rows are not heads of {head_dim}")
    rope = config.get("rope_parameters") or {}
    return {
        "hidden_size": width,
        "intermediate_size": tensor_named(named, f"{OURS}mlp.gate_proj.weight").shape[0],
        "heads": q_rows // head_dim,
        "num_kv_heads": k_rows // head_dim,
        "head_dim": head_dim,
        "rope_theta": number(config, "rope_theta", number(rope, "rope_theta", 10000.0)),
        "rope_scaling": _scaling(config, rope),
        "max_seq_len": int(number(config, "max_position_embeddings", 2048)),
        "rms_norm_eps": number(config, "rms_norm_eps", 1e-6),
        "fc_bias": "fc.bias" in tensors,
        "qkv_bias": f"{OURS}self_attn.q_proj.bias" in tensors,
        "output_bias": f"{OURS}self_attn.o_proj.bias" in tensors,
        "own_embeddings": "embed_tokens.weight" in tensors,
    }


def _scaling(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any] | None:
    found = config.get("rope_scaling") or rope
    kind = found.get("rope_type", found.get("type", "default"))
    return None if kind == "default" else dict(found)


def _vocabulary(named: Checkpoint) -> int:
    """Tokens of the target, by the tensors where they say it."""
    for name in ("t2d", "embed_tokens.weight"):
        if name in named.tensors:
            return named.tensors[name].shape[0]
    output = named.config.get("vocab_size")
    if output is None:
        raise WeightsError(f"{named.folder}: t2d, embed_tokens or vocab_size must say how many tokens there are")
    return int(output)


def _eagle1_config(named: Checkpoint) -> EagleConfig:
    fields = _shape_fields(named)
    vocabulary, width = _vocabulary(named), fields["hidden_size"]
    sizes = {"vocab_size": vocabulary, "draft_vocab_size": vocabulary, "target_hidden_size": width}
    return EagleConfig(EAGLE_1, **fields, **sizes)


def _eagle3_config(named: Checkpoint, config: Mapping[str, Any]) -> EagleConfig:
    inner = config.get("eagle_config") or {}
    output = config.get("eagle_aux_hidden_state_layer_ids") or inner.get("eagle_aux_hidden_state_layer_ids") or ()
    layers = tuple(int(layer) for layer in output)
    joined, states = tensor_named(named, "fc.weight").shape[1], len(layers) or USUAL_FEATURES
    if joined % states:
        raise WeightsError(f"{named.folder}: fc.weight reads {joined} values, which {states} states cannot fill evenly")

    def flag(name: str) -> bool:
        return bool(config.get(name, inner.get(name, False)))

    return EagleConfig(
        EAGLE_3,
        **_shape_fields(named),
        vocab_size=_vocabulary(named),
        draft_vocab_size=tensor_named(named, "lm_head.weight").shape[0],
        target_hidden_size=joined // states,
        feature_layers=layers,
        norm_before_residual=flag("norm_before_residual"),
        norm_before_fc="input_norm.weight" in named.tensors,
        fc_norm="fc_norm.0.weight" in named.tensors,
        norm_output=flag("norm_output"),
    )


def _complete_vocabulary(named: Checkpoint, config: EagleConfig) -> None:
    """A head that says every token needs no map, and t2d follows from d2t."""
    tensors = named.tensors
    if "d2t" not in tensors and config.draft_vocab_size == config.vocab_size:
        tensors["d2t"] = torch.zeros(config.draft_vocab_size, dtype=torch.int64)
    if "t2d" not in tensors and "d2t" in tensors:
        ids = tensors["d2t"] + torch.arange(tensors["d2t"].shape[0])
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        tensors["t2d"][ids[(ids >= 0) & (ids < config.vocab_size)]] = True


def _check_vocabulary(head: EagleHead, folder: Path) -> None:
    ids = head.target_ids
    if int(ids.min()) < 0 or int(ids.max()) >= head.config.vocab_size:
        raise WeightsError(
            f"{folder}: d2t points outside the {head.config.vocab_size} tokens of the target; "
            f"it should hold offsets (target id = i + d2t[i])"
        )


# --- writing ----------------------------------------------------------------------------------------------------------


def save_eagle(
    head: EagleHead,
    folder: str | Path,
    *,
    layout: str = "original",
    about: Provenance | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a head in its project's own layout, or in speculators' (EAGLE-3 only). vLLM loads both."""
    if layout not in LAYOUTS or (layout == "speculators" and head.config.kind == EAGLE_1):
        raise OptionError(f"an {head.config.kind} head is not written in the layout {layout!r}")
    about = about or Provenance()
    listed = layout == "speculators" or head.config.kind == EAGLE_1
    tensors = {_written(name, listed): _as(value, dtype) for name, value in head.state_dict().items()}
    make = _speculators_config if layout == "speculators" else _original_config
    write_checkpoint(folder, make(head.config, about, dtype or head.fc.weight.dtype), tensors)


def _written(name: str, listed: bool) -> str:
    return LISTED + name.removeprefix(OURS) if listed and name.startswith(OURS) else name


def _as(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def _llama_fields(config: EagleConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What a Llama config says of the one layer."""
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.heads,
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


def _norm_fields(config: EagleConfig) -> dict[str, Any]:
    """Always written: where they are absent one program reads True and another False."""
    return {
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }


def _original_config(config: EagleConfig, about: Provenance, dtype: torch.dtype) -> dict[str, Any]:
    fields = {**_llama_fields(config, dtype), "base_model_name_or_path": about.target}
    if config.kind == EAGLE_1:
        return {**fields, "architectures": ["LlamaForCausalLM"], "bias": config.fc_bias}
    return {
        **fields,
        **_norm_fields(config),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
            "use_aux_hidden_state": True,
        },
    }


def _speculators_config(config: EagleConfig, about: Provenance, dtype: torch.dtype) -> dict[str, Any]:
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": about.num_draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        **_norm_fields(config),
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": _llama_fields(config, dtype),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
        "torch_dtype": str(dtype).removeprefix("torch."),
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": about.target, "architectures": list(about.architectures)},
        },
    }
