"""DFlash heads in GGUF files (architecture `dflash`), as llama.cpp's converter writes them.

Layer ids are already those of layers whose input is read; the mask token is the tokenizer's. Weights are unpacked.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.errors import WeightsError
from paceline.heads.block_attention import FULL, SLIDING
from paceline.heads.checkpoint import Checkpoint
from paceline.hub.convert import open_gguf
from paceline.hub.gguf_fields import GgufFields

if TYPE_CHECKING:
    from gguf import GGUFReader

ARCHITECTURE = "dflash"
LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+?)(\.weight|\.bias|)")
LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_conv_base": "attention_conv.base_kernel",
    "attn_conv_proj": "attention_conv.kernel_projection",
    "ffn_conv_base": "mlp_conv.base_kernel",
    "ffn_conv_proj": "mlp_conv.kernel_projection",
}
TOP_NAMES = {
    "enc.output_norm.weight": "hidden_norm.weight",
    "enc_output_norm.weight": "hidden_norm.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
    "token_embd.weight": "embed_tokens.weight",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
}
# Keys of the architecture that a head's config has under the same name.
SAME_KEYS = ("block_size", "selector_top_k", "output_multiplier", "final_logit_softcapping", "input_embedding_scale")


def holds_head(path: Path) -> bool:
    """Whether a GGUF file is a head and no whole model. Raises WeightsError."""
    return GgufFields(open_gguf(path), path).architecture == ARCHITECTURE


def read_gguf(path: Path) -> Checkpoint:
    """Config and tensors of a file, in z-lab's layout. Raises WeightsError."""
    reader = open_gguf(path)
    fields = GgufFields(reader, path)
    if fields.architecture != ARCHITECTURE:
        raise WeightsError(f"{path.name} holds a model of architecture {fields.architecture}, not a trained head")
    tensors = _tensors(reader)
    return Checkpoint(path, _config(fields, tensors), tensors)


def _tensors(reader: GGUFReader) -> dict[str, Tensor]:
    from gguf import dequantize

    tensors: dict[str, Tensor] = {}
    for stored in reader.tensors:
        numbers = torch.tensor(dequantize(stored.data, stored.tensor_type), dtype=torch.float32)
        tensors[_name(stored.name)] = numbers.reshape([int(size) for size in reversed(stored.shape)])
    return tensors


def _name(name: str) -> str:
    """The name in z-lab's layout; one that is not known stays as it is, and loading names it."""
    layer = LAYER.fullmatch(name)
    if layer is None or layer[2] not in LAYER_NAMES:
        return TOP_NAMES.get(name, name)
    suffix = "" if layer[2].endswith("_base") else layer[3]
    return f"layers.{layer[1]}.{LAYER_NAMES[layer[2]]}{suffix}"


def _config(fields: GgufFields, tensors: dict[str, Tensor]) -> dict[str, Any]:
    is_dspark = "markov_head.markov_w1.weight" in tensors or "confidence_head.proj.weight" in tensors
    inner = {key: fields.of_architecture(key) for key in SAME_KEYS}
    inner["target_layer_ids"] = [int(layer) - 1 for layer in fields.of_architecture("target_layers") or ()]
    inner["mask_token_id"] = fields.get("tokenizer.ggml.mask_token_id")
    inner["sample_from_anchor"] = fields.of_architecture("sample_from_anchor", is_dspark)
    return {
        "architectures": ["DSparkDraftModel" if is_dspark else "DFlashDraftModel"],
        "dflash_config": {key: value for key, value in inner.items() if value is not None},
        "is_causal": fields.of_architecture("attention.causal"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": fields.number("rope.freq_base", 10000.0),
        "max_position_embeddings": fields.number("context_length", 2048),
        "vocab_size": fields.of_architecture("vocab_size") or len(fields.get("tokenizer.ggml.tokens") or ()) or None,
        **_windows(fields),
    }


def _windows(fields: GgufFields) -> dict[str, Any]:
    window, layers = fields.number("attention.sliding_window", 0), int(fields.number("block_count", 0))
    if not window:
        return {}
    pattern = fields.of_architecture("attention.sliding_window_pattern")
    slides = [bool(value) for value in pattern] if isinstance(pattern, list) else [True] * layers
    return {"sliding_window": int(window), "layer_types": [SLIDING if slide else FULL for slide in slides]}
