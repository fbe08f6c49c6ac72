"""GGUF files of other architectures, through transformers. It ignores what it does not know; that is checked here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import ModelError, WeightsError
from paceline.hub.gguf_eos import eos_token_ids
from paceline.hub.gguf_fields import GgufFields
from paceline.hub.model_config import decoder_sizes
from paceline.hub.progress import stage

if TYPE_CHECKING:
    from gguf import GGUFReader

# What a key of the file is called in a Hugging Face config. A file is converted only if both say the same.
CONFIG_NAMES: Mapping[str, tuple[str, ...]] = {
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads", "num_attention_heads"),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "block_count": ("num_hidden_layers", "n_layer"),
    "context_length": ("max_position_embeddings", "n_positions", "seq_length"),
    "embedding_length": ("hidden_size", "n_embd"),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_used_count": ("num_experts_per_tok",),
    "feed_forward_length": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "rope.dimension_count": ("rotary_dim",),
    "rope.freq_base": ("rope_theta",),
}


def convert_by_transformers(gguf: Path, reader: GGUFReader, fields: GgufFields, folder: Path) -> None:
    """Convert a file and check that transformers has understood all of it. Raises WeightsError or ModelError."""
    fields.check_all_understood(lambda key: key.removeprefix(f"{fields.architecture}.") in CONFIG_NAMES)
    if find_spec("accelerate") is None:
        raise ModelError(f"to convert a GGUF of {fields.architecture}, transformers needs: pip install accelerate")
    _refuse_rope_tensors(reader)
    model = _load(gguf)
    model.config.eos_token_id = model.generation_config.eos_token_id = eos_token_ids(fields)
    _check_config(fields, model.config)
    _check_tensors(reader, model)
    quantizer = vars(model).get("hf_quantizer")
    if quantizer is not None:  # the weights are dequantized; the mark of their origin would forbid saving them
        quantizer.remove_quantization_config(model)
    model.save_pretrained(folder)


def _refuse_rope_tensors(reader: GGUFReader) -> None:
    for tensor in reader.tensors:
        if tensor.name.startswith("rope_"):
            raise WeightsError(f"the GGUF file holds the tensor {tensor.name}, which transformers does not read")


def _load(gguf: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"gguf_file": gguf.name, "dtype": torch.bfloat16, "output_loading_info": True}
    try:
        with stage("converting"):
            model, loading = AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
    except Exception as error:  # a file that does not fit raises anything, from KeyError to AssertionError
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise WeightsError(f"transformers cannot convert {gguf.name}: {reason}") from error
    for name in sorted({*loading["missing_keys"], *loading["unexpected_keys"]}):
        raise WeightsError(f"transformers does not find the tensor {name} in {gguf.name}, or has no use for it")
    return model


def _check_config(fields: GgufFields, config: Any) -> None:
    """Every number of the file is the config's. Where the config has no such field, the value cannot be honoured."""
    values = _flat(config)
    for key in fields.names():
        names = CONFIG_NAMES.get(key.removeprefix(f"{fields.architecture}."), ())
        if names and not any(_same(fields.get(key), values.get(name)) for name in names):
            raise fields.refused(key, fields.get(key))


def _flat(config: Any) -> dict[str, Any]:
    """The fields of a config, with its rope's among them. rotary_dim is the part of a head that is rotated."""
    values: dict[str, Any] = config.to_dict()
    rope: dict[str, Any] = values.get("rope_parameters") or {}
    share = rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
    head_dim = decoder_sizes(values).head_dim
    rotary = {"rope_theta": rope.get("rope_theta"), "rotary_dim": int(head_dim * share)}
    return {**values, **rotary, "head_dim": head_dim}


def _same(stored: Any, used: Any) -> bool:
    if isinstance(stored, int | float) and isinstance(used, int | float):
        return math.isclose(stored, used, rel_tol=1e-6)
    return bool(stored == used)


def _check_tensors(reader: GGUFReader, model: Any) -> None:
    """As many weights as the file holds; transformers skips tensors whose names it does not map."""
    stored = sum(int(tensor.n_elements) for tensor in reader.tensors)
    used = sum(parameter.numel() for parameter in model.parameters())
    if stored != used:
        raise WeightsError(f"the GGUF file holds {stored} weights, and transformers uses {used} of them")
