"""Tiny checkpoints with an MTP head among their tensors, as the families publish them.

Nothing here goes through paceline's readers or writers: names and shapes are those of the published files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.families import Variant, write_family

HIDDEN, INNER, EXPERT, EXPERTS = 32, 48, 24, 4
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
NOPE, ROPE, VALUE, LATENT = 8, 8, 8, 16
LAYERS = 2
DENSE = ("qwen3_5_text", "mimo_v2_flash")
MULTI_LATENT = ("deepseek_v3", "glm4_moe_lite")
QWEN = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
LISTED = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
MIMO_V2 = "mimo_v2_flash"
FAMILIES = (*QWEN, *LISTED, MIMO_V2)


class _Random:
    """Random tensors, one after another."""

    def __init__(self, seed: int) -> None:
        self._rng = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int, scale: float = 0.25) -> Tensor:
        return torch.randn(*shape, generator=self._rng) * scale

    def norm(self, size: int, centre: float) -> Tensor:
        return centre + self.matrix(size, scale=0.1)


def head_tensors(model_type: str, seed: int = 1) -> dict[str, Tensor]:
    """The MTP head of a family, under its published names."""
    random = _Random(seed)
    if model_type in QWEN:
        named = {"fc.weight": random.matrix(HIDDEN, 2 * HIDDEN)}
        norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        named |= {f"{name}.weight": random.norm(HIDDEN, 0.0) for name in norms}
        layer = layer_tensors(model_type, random, 0.0)
        return {f"mtp.{name}": value for name, value in {**named, **_under("layers.0.", layer)}.items()}
    named = {"eh_proj.weight": random.matrix(HIDDEN, 2 * HIDDEN)}
    last = "final_layernorm" if model_type == MIMO_V2 else "shared_head.norm"
    named |= {f"{name}.weight": random.norm(HIDDEN, 1.0) for name in ("enorm", "hnorm", last)}
    if model_type == MIMO_V2:
        return _under("model.mtp.layers.0.", {**named, **layer_tensors(model_type, random, 1.0)})
    copies = {name: random.matrix(264, HIDDEN) for name in ("embed_tokens.weight", "shared_head.head.weight")}
    return _under(f"model.layers.{LAYERS}.", {**named, **copies, **layer_tensors(model_type, random, 1.0)})


def several_modules(model_type: str, count: int) -> dict[str, Tensor]:
    """A head of several modules: Qwen's share all but the decoder layer."""
    tensors = head_tensors(model_type)
    for index in range(1, count):
        layer = head_tensors(model_type, seed=10 + index)
        if model_type in (*QWEN, MIMO_V2):  # all tensors of a module of MiMo-V2 have its number
            own = {name: value for name, value in layer.items() if ".layers.0." in name}
            tensors |= {name.replace(".layers.0.", f".layers.{index}."): value for name, value in own.items()}
        else:
            old, new = f"layers.{LAYERS}.", f"layers.{LAYERS + index}."
            tensors |= {name.replace(old, new): value for name, value in layer.items()}
    return tensors


GGUF_ARCHITECTURES = {"qwen3_5_text": "qwen35", "glm4_moe": "glm4moe", "glm4_moe_lite": "deepseek2"}
GGUF_NAMES = {
    "fc": "nextn.eh_proj", "eh_proj": "nextn.eh_proj", "pre_fc_norm_embedding": "nextn.enorm", "enorm": "nextn.enorm",
    "pre_fc_norm_hidden": "nextn.hnorm", "hnorm": "nextn.hnorm", "norm": "nextn.shared_head_norm",
    "shared_head.norm": "nextn.shared_head_norm", "shared_head.head": "nextn.shared_head_head",
    "embed_tokens": "nextn.embed_tokens", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b", "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp", "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp", "mlp.shared_experts.down_proj": "ffn_down_shexp",
}  # fmt: skip


def write_gguf_head(path: Path, model_type: str, tensors: dict[str, Tensor]) -> Path:
    """The head alone as llama.cpp's converter writes it: norms of Qwen moved by one, kv_b_proj in two halves."""
    import gguf

    architecture = GGUF_ARCHITECTURES[model_type]
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_uint32(f"{architecture}.block_count", LAYERS + 1)
    writer.add_uint32(f"{architecture}.nextn_predict_layers", 1)
    for name, value in gguf_tensors(model_type, tensors).items():
        writer.add_tensor(f"blk.{LAYERS}.{name}", value.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(model_type: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {"gate": [], "up": [], "down": []}
    for full, value in tensors.items():
        rest = full.removeprefix("mtp.").removeprefix("layers.0.").removeprefix(f"model.layers.{LAYERS}.")
        name, _, suffix = rest.rpartition(".")
        if name.startswith("mlp.experts."):
            experts[name.split(".")[3].removesuffix("_proj")].append(value)
        elif suffix == "e_score_correction_bias":
            named["exp_probs_b.bias"] = value
        elif name == "self_attn.kv_b_proj":
            keys, values = value.view(HEADS, NOPE + VALUE, LATENT).split([NOPE, VALUE], dim=1)
            named |= {"attn_k_b.weight": keys.transpose(1, 2), "attn_v_b.weight": values}
        else:
            moved = model_type in QWEN and (name.endswith("norm") or name.startswith("pre_fc_norm"))
            named[f"{GGUF_NAMES[name]}.{suffix}"] = value + 1 if moved else value
    stacked = {f"ffn_{part}_exps.weight": torch.stack(values) for part, values in experts.items() if values}
    return named | stacked


def random_tensors(prefix: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Matrices, and vectors around one."""
    random = _Random(3)
    return {
        prefix + name: random.norm(*shape, 1.0) if len(shape) == 1 else random.matrix(*shape)
        for name, shape in shapes.items()
    }


def layer_tensors(model_type: str, random: _Random, centre: float) -> dict[str, Tensor]:
    norms = ("input_layernorm", "pre_mlp_layernorm" if model_type == MIMO_V2 else "post_attention_layernorm")
    named = {f"{name}.weight": random.norm(HIDDEN, centre) for name in norms}
    latent = model_type in MULTI_LATENT
    named |= _under("self_attn.", _latent_attention(random) if latent else _attention(model_type, random, centre))
    return named | _under("mlp.", _gated(random, INNER) if model_type in DENSE else _experts(model_type, random))


def _attention(model_type: str, random: _Random, centre: float) -> dict[str, Tensor]:
    gates = 2 if model_type in QWEN else 1
    kv_heads = 2 * KV_HEADS if model_type == MIMO_V2 else KV_HEADS  # its layers with windows have twice as many
    named = {
        "q_proj.weight": random.matrix(gates * HEADS * HEAD_DIM, HIDDEN),
        "k_proj.weight": random.matrix(kv_heads * HEAD_DIM, HIDDEN),
        "v_proj.weight": random.matrix(kv_heads * HEAD_DIM, HIDDEN),
        "o_proj.weight": random.matrix(HIDDEN, HEADS * HEAD_DIM),
    }
    if model_type == MIMO_V2:
        named["attention_sink_bias"] = random.matrix(HEADS, scale=1.0)
    norms = ("q_norm", "k_norm") if model_type in QWEN else ()
    return named | {f"{name}.weight": random.norm(HEAD_DIM, centre) for name in norms}


def _latent_attention(random: _Random) -> dict[str, Tensor]:
    return {
        "q_a_proj.weight": random.matrix(LATENT, HIDDEN),
        "q_a_layernorm.weight": random.norm(LATENT, 1.0),
        "q_b_proj.weight": random.matrix(HEADS * (NOPE + ROPE), LATENT),
        "kv_a_proj_with_mqa.weight": random.matrix(LATENT + ROPE, HIDDEN),
        "kv_a_layernorm.weight": random.norm(LATENT, 1.0),
        "kv_b_proj.weight": random.matrix(HEADS * (NOPE + VALUE), LATENT),
        "o_proj.weight": random.matrix(HIDDEN, HEADS * VALUE),
    }


def _experts(model_type: str, random: _Random) -> dict[str, Tensor]:
    """Experts one by one, the router, and the expert that all tokens share."""
    named = {"gate.weight": random.matrix(EXPERTS, HIDDEN, scale=1.0)}
    for index in range(EXPERTS):
        named |= _under(f"experts.{index}.", _gated(random, EXPERT))
    if model_type in QWEN:
        named["shared_expert_gate.weight"] = random.matrix(1, HIDDEN)
        return named | _under("shared_expert.", _gated(random, EXPERT))
    named["gate.e_score_correction_bias"] = random.matrix(EXPERTS, scale=0.3)
    return named | _under("shared_experts.", _gated(random, EXPERT))


def _gated(random: _Random, inner: int) -> dict[str, Tensor]:
    return {
        "gate_proj.weight": random.matrix(inner, HIDDEN),
        "up_proj.weight": random.matrix(inner, HIDDEN),
        "down_proj.weight": random.matrix(HIDDEN, inner),
    }


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in tensors.items()}


def write_target(model_type: str, folder: Path, head: dict[str, Tensor] | None = None) -> Path:
    """A whole checkpoint: a tiny target of the family, and its head in the same file. head: {} for none."""
    write_family(Variant(model_type), folder)
    add_tensors(folder, head_tensors(model_type) if head is None else head)
    edit_config(folder, num_nextn_predict_layers=1)
    return folder


def add_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, **tensors}, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
