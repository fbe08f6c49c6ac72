"""MTP heads in GGUF files, as llama.cpp's converter writes them: blk.L.nextn.* beside one decoder layer.

The file may be the whole target or the head alone (mtp-….gguf). It says less of the layer than the config.json of the
target, so the head is read together with that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.errors import WeightsError
from paceline.heads.checkpoint import Checkpoint
from paceline.heads.mtp_names import BLOCK, layout_for
from paceline.hub.convert import open_gguf
from paceline.hub.gguf_fields import GgufFields

if TYPE_CHECKING:
    from gguf import GGUFReader

NEXTN = "nextn_predict_layers"
BLOCK_NAME = re.compile(r"blk\.(\d+)\.(.+?)(\.weight|\.bias|)")
OUTER = {"nextn.eh_proj": "fc", "nextn.enorm": "enorm", "nextn.hnorm": "hnorm", "nextn.shared_head_norm": "norm"}
COPIES = ("nextn.embed_tokens", "nextn.shared_head_head")
LAYER = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
SHARED = {"ffn_gate_shexp": "gate_proj", "ffn_up_shexp": "up_proj", "ffn_down_shexp": "down_proj"}
EXPERTS = {"ffn_gate_exps": "gate", "ffn_up_exps": "up", "ffn_down_exps": "down"}
HALVES = ("attn_k_b", "attn_v_b")  # of kv_b_proj
ZERO_CENTRED = ("qwen35", "qwen35moe", "qwen3next")  # architectures whose norms the converter has moved by one


def read_mtp_gguf(path: Path, document: Mapping[str, Any]) -> Checkpoint:
    """The head in a file under the names its target's family has. document: the target's config. Raises WeightsError.

    A file without a head, or of another architecture than the target's, is named.
    """
    reader = open_gguf(path)
    fields = GgufFields(reader, path)
    count = int(fields.number(NEXTN, 0))
    if not count:
        raise WeightsError(f"{path.name} holds no MTP head ({fields.architecture}.{NEXTN} is not there)")
    first = int(fields.number("block_count")) - count
    text = document.get("text_config") or document
    if first != text["num_hidden_layers"]:
        raise WeightsError(f"{path.name} is of a model of {first} layers; the target has {text['num_hidden_layers']}")
    own = _own_names(_tensors(reader, first), fields.architecture in ZERO_CENTRED)
    layout = layout_for(str(document.get("model_type")))
    return Checkpoint(path, dict(document), {layout.stored_name(name, first): value for name, value in own.items()})


def _tensors(reader: GGUFReader, first: int) -> dict[int, dict[str, Tensor]]:
    """The tensors of every module by their names inside the block."""
    from gguf import dequantize

    modules: dict[int, dict[str, Tensor]] = {}
    for stored in reader.tensors:
        match = BLOCK_NAME.fullmatch(stored.name)
        if match is None or int(match[1]) < first or match[2] in COPIES:
            continue
        numbers = torch.tensor(dequantize(stored.data, stored.tensor_type), dtype=torch.float32)
        shaped = numbers.reshape([int(size) for size in reversed(stored.shape)])
        modules.setdefault(int(match[1]) - first, {})[match[2] + match[3]] = shaped
    return modules


def _own_names(modules: Mapping[int, Mapping[str, Tensor]], zero_centred: bool) -> dict[str, Tensor]:
    """Tensors under the names of the module (heads/mtp_names.py)."""
    named: dict[str, Tensor] = {}
    for index, tensors in modules.items():
        prefix = "" if index == 0 else f"further.{index - 1}."
        for name, value in _block_names(tensors).items():
            is_norm = zero_centred and name.endswith("norm.weight")
            named[prefix + name] = value - 1 if is_norm else value
    return named


def _block_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    shared = "mlp.shared_expert." if "ffn_gate_inp_shexp.weight" in tensors else "mlp.shared_experts."
    named: dict[str, Tensor] = {}
    for full, value in tensors.items():
        name, _, suffix = full.rpartition(".")
        if name in OUTER:
            named[f"{OUTER[name]}.{suffix}"] = value
        elif name in SHARED:
            named[f"{BLOCK}{shared}{SHARED[name]}.{suffix}"] = value
        elif name in EXPERTS:
            experts = enumerate(value)
            named |= {f"{BLOCK}mlp.experts.{i}.{EXPERTS[name]}_proj.weight": expert for i, expert in experts}
        elif name == "exp_probs_b":
            named[f"{BLOCK}mlp.gate.e_score_correction_bias"] = value
        elif name not in HALVES:
            own = value.reshape(1, -1) if name == "ffn_gate_inp_shexp" else value
            named[f"{BLOCK}{LAYER.get(name, name)}.{suffix}"] = own
    return named | _joined_halves(tensors)


def _joined_halves(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """kv_b_proj of its two halves; that of the keys is stored transposed."""
    if "attn_k_b.weight" not in tensors:
        return {}
    keys, values = (tensors[f"{name}.weight"] for name in HALVES)
    joined = torch.cat([keys.transpose(1, 2), values], dim=1)  # [heads, nope + value size, rank]
    return {f"{BLOCK}self_attn.kv_b_proj.weight": joined.flatten(0, 1)}
