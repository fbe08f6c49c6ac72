"""Small DFlash checkpoints as other projects publish them, tensor by tensor: nothing here goes through our writers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INNER, VOCABULARY, REDUCED = 32, 40, 50, 20
HEADS, KV_HEADS, HEAD_DIM, LAYERS, RANK, MASK = 4, 2, 8, 2, 6, 49

Tensors = dict[str, Tensor]


def random(*shape: int, at: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + 1000 * at)) * 0.3


def layer(index: int) -> Tensors:
    at = f"layers.{index}."
    return {
        f"{at}self_attn.q_proj.weight": random(HEADS * HEAD_DIM, HIDDEN, at=4 * index),
        f"{at}self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN, at=4 * index + 1),
        f"{at}self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, HIDDEN, at=4 * index + 2),
        f"{at}self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM, at=4 * index + 3),
        f"{at}self_attn.q_norm.weight": 1 + random(HEAD_DIM, at=index),
        f"{at}self_attn.k_norm.weight": 1 + random(HEAD_DIM, at=index + 9),
        f"{at}mlp.gate_proj.weight": random(INNER, HIDDEN, at=index),
        f"{at}mlp.up_proj.weight": random(INNER, HIDDEN, at=index + 9),
        f"{at}mlp.down_proj.weight": random(HIDDEN, INNER, at=index),
        f"{at}input_layernorm.weight": 1 + random(HIDDEN, at=index),
        f"{at}post_attention_layernorm.weight": 1 + random(HIDDEN, at=index + 9),
    }


def dflash() -> Tensors:
    shared = {
        "fc.weight": random(HIDDEN, 2 * HIDDEN),
        "hidden_norm.weight": 1 + random(HIDDEN, at=5),
        "norm.weight": 1 + random(HIDDEN, at=6),
    }
    return {**layer(0), **layer(1), **shared}


def dflash2() -> Tensors:
    tensors = dflash()
    for index in range(LAYERS):
        for name in ("attention_conv", "mlp_conv"):
            tensors[f"layers.{index}.{name}.base_kernel"] = 1 + random(2, 2, HIDDEN, at=index)
            tensors[f"layers.{index}.{name}.kernel_projection.weight"] = random(2 * 2 * HIDDEN // 8, HIDDEN, at=index)
    tensors["candidate_selector.predecessor_codebook"] = random(VOCABULARY, RANK)
    tensors["candidate_selector.successor_codebook"] = random(VOCABULARY, RANK, at=1)
    tensors["candidate_selector.hidden_projection.weight"] = random(RANK, HIDDEN)
    return tensors


def dspark(vocabulary: int = VOCABULARY) -> Tensors:
    return {
        **dflash(),
        "markov_head.markov_w1.weight": random(VOCABULARY, RANK),
        "markov_head.markov_w2.weight": random(vocabulary, RANK, at=1),
        "confidence_head.proj.weight": random(1, HIDDEN + RANK),
        "confidence_head.proj.bias": random(1),
    }


def vocabulary() -> Tensors:
    """A reduced one, as speculators writes it."""
    ids = torch.arange(REDUCED) * 2 + 1
    output = torch.zeros(VOCABULARY, dtype=torch.bool)
    output[ids] = True
    return {"d2t": ids - torch.arange(REDUCED), "t2d": output, "lm_head.weight": random(REDUCED, HIDDEN)}


def meta() -> Tensors:
    """Meta's names of the two tensors that read the target's states."""
    tensors = dflash()
    tensors["encoder.fc.weight"] = tensors.pop("fc.weight")
    tensors["encoder.output_norm_enc.weight"] = tensors.pop("hidden_norm.weight")
    return tensors


def qwen3() -> dict[str, Any]:
    return {
        "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "layer_types": ["full_attention"] * LAYERS,
        "sliding_window": None, "tie_word_embeddings": False,
    }  # fmt: skip


def speculators(kind: str, **more: Any) -> dict[str, Any]:
    return {
        "speculators_model_type": kind, "architectures": ["DFlashSpeculator"], "block_size": 5, "mask_token_id": MASK,
        "aux_hidden_state_layer_ids": [1, 3], "draft_vocab_size": VOCABULARY,
        "transformer_layer_config": {**qwen3(), "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}},
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "tiny", "architectures": []}}, **more,
    }  # fmt: skip


MARKOV = {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": True}
INNER_KEYS = {"mask_token_id": MASK, "target_layer_ids": [0, 2]}
CONFIGS: dict[str, dict[str, Any]] = {
    "z-lab": {
        **qwen3(), "architectures": ["DFlashDraftModel"], "rope_theta": 5000.0, "block_size": 5,
        "num_target_layers": 3, "dflash_config": INNER_KEYS,
    },
    "z-lab-nested": {
        **qwen3(), "architectures": ["DFlashDraftModel"], "dflash_config": {**INNER_KEYS, "block_size": 5},
        "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
    },
    "dflash2": {
        **qwen3(), "architectures": ["DFlash2DraftModel"], "is_causal": False,
        "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
        "dflash_config": {**INNER_KEYS, "block_size": 5, "conv_kernel_size": 2, "conv_group_size": 8,
                          "selector_rank": RANK, "selector_top_k": 4},
    },
    "deepspec": {
        **qwen3(), "architectures": ["Qwen3DSparkModel"], "rope_theta": 5000.0, "block_size": 5, **INNER_KEYS, **MARKOV,
        "confidence_head_with_markov": True, "num_anchors": 512,
    },
    "specforge": {
        **qwen3(), "architectures": ["DSparkDraftModel"], "rope_theta": 5000.0,
        "dflash_config": {**INNER_KEYS, **MARKOV, "block_size": 5, "projector_type": "dspark"},
    },
    "meta": {
        **qwen3(), "architectures": ["DFlashDraftModel"], "rope_theta": 5000.0, "block_size": 5,
        "dflash_config": INNER_KEYS,
    },
    "speculators": speculators("dflash", sample_from_anchor=False),
    "speculators-reduced": speculators("dflash", draft_vocab_size=REDUCED),
    "speculators-dflash2": speculators("dflash2", conv_kernel_size=2, conv_group_size=8, selector_rank=RANK,
                                       selector_top_k=4),
    "speculators-dspark": speculators("dspark", **MARKOV),
}  # fmt: skip
TENSORS = {
    "z-lab": dflash,
    "z-lab-nested": dflash,
    "dflash2": dflash2,
    "deepspec": dspark,
    "specforge": dspark,
    "meta": meta,
    "speculators": dflash,
    "speculators-reduced": lambda: {**dflash(), **vocabulary()},
    "speculators-dflash2": dflash2,
    "speculators-dspark": dspark,
}


def write(folder: Path, layout: str, tensors: Tensors | None = None, **config: Any) -> Path:
    """A checkpoint of one layout; `tensors` and `config` replace what belongs into it. A value of None drops a key."""
    folder.mkdir(parents=True, exist_ok=True)
    keys = {name: value for name, value in {**CONFIGS[layout], **config}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(keys))
    save_file(TENSORS[layout]() if tensors is None else tensors, folder / "model.safetensors")
    return folder


# --- GGUF -------------------------------------------------------------------------------------------------------------

GGUF_LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "attention_conv.base_kernel": "attn_conv_base",
    "attention_conv.kernel_projection": "attn_conv_proj", "mlp_conv.base_kernel": "ffn_conv_base",
    "mlp_conv.kernel_projection": "ffn_conv_proj",
}  # fmt: skip
GGUF_TOP = {
    "hidden_norm.weight": "enc.output_norm.weight", "norm.weight": "output_norm.weight",
    "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
    "candidate_selector.successor_codebook": "selector_successor.weight",
    "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight", "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight", "confidence_head.proj.bias": "conf_proj.bias",
}  # fmt: skip


def gguf_name(name: str) -> str:
    if not name.startswith("layers."):
        return GGUF_TOP.get(name, name)
    _, index, rest = name.split(".", 2)
    suffix = ".weight" if rest.endswith(".weight") else ""
    return f"blk.{index}.{GGUF_LAYER[rest.removesuffix('.weight')]}{suffix}"


def write_gguf(path: Path, tensors: Tensors, architecture: str = "dflash") -> Path:
    """As llama.cpp's converter does: layer ids + 1, the mask token with the tokenizer's tokens."""
    import gguf

    writer = gguf.GGUFWriter(str(path), architecture)
    sizes = {"block_count": LAYERS, "embedding_length": HIDDEN, "block_size": 5, "vocab_size": VOCABULARY}
    for key, value in sizes.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_array(f"{architecture}.target_layers", [1, 3])
    writer.add_float32(f"{architecture}.rope.freq_base", 5000.0)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_uint32(f"{architecture}.context_length", 512)
    writer.add_uint32(f"{architecture}.selector_top_k", 4)
    writer.add_uint32("tokenizer.ggml.mask_token_id", MASK)
    for name, value in tensors.items():
        writer.add_tensor(gguf_name(name), value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
