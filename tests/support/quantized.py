"""Tiny checkpoints in the weight formats people download, written from the definition of each layout.

Nothing here uses paceline: every writer packs codes in its own way and returns the weight that they stand for, so a
test compares two readings of one layout.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.tiny import write_tiny_model

SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output feature at each place of a word, from the lowest bits
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A layer as a checkpoint stores it: tensors by the end of their names, and the weight they stand for."""

    tensors: dict[str, Tensor]
    weight: Tensor


@dataclass(frozen=True, slots=True)
class Case:
    """A format: how it stores a layer, what its config says, and which layers it leaves as they are."""

    store: Callable[[Tensor], Stored]
    config: dict[str, Any]
    left: str = r"$^"
    changes: dict[str, Any] = field(default_factory=dict)


def write_quantized(folder: Path, case: Case) -> Path:
    """Write the checkpoint to folder/packed and the same weights in float32 to folder/unpacked."""
    packed, unpacked = folder / "packed", folder / "unpacked"
    for place in (packed, unpacked):
        write_tiny_model(place, **(SIZES | case.changes))
    state = load_file(unpacked / "model.safetensors")
    stored = dict(state)
    for name in [name for name in state if name.endswith("_proj.weight") and not re.search(case.left, name)]:
        layer = case.store(stored.pop(name))
        state[name] = layer.weight.float().contiguous()
        stored |= {f"{name.removesuffix('.weight')}.{end}": part.contiguous() for end, part in layer.tensors.items()}
    save_file(state, unpacked / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    document = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(document | {"quantization_config": case.config}))
    return folder


# --- integers ---------------------------------------------------------------------------------------------------------


def packed_int32(codes: Tensor, bits: int) -> Tensor:
    """Codes along the last dimension into 32-bit words, the first in the lowest bits."""
    rows = []
    for row in codes.reshape(-1, codes.shape[-1]).tolist():
        words = []
        for start in range(0, len(row), 32 // bits):
            word = 0
            for place, code in enumerate(row[start : start + 32 // bits]):
                word |= int(code) << (bits * place)
            words.append(word - 2**32 if word >= 2**31 else word)
        rows.append(words)
    return torch.tensor(rows, dtype=torch.int32).view(*codes.shape[:-1], -1)


@dataclass(frozen=True, slots=True, eq=False)
class Rounded:
    codes: Tensor  # [out_features, in_features], 0 to 2^bits - 1
    scales: Tensor  # [out_features, groups]
    zeros: Tensor  # [out_features, groups]
    groups: Tensor  # [in_features]: the group of each

    def weight(self) -> Tensor:
        """(code - zero) * scale, in the dtype of the scales."""
        centred = (self.codes - self.zeros[:, self.groups]).to(self.scales.dtype)
        return centred * self.scales[:, self.groups]


def rounded(weight: Tensor, bits: int, group: int, dtype: torch.dtype, *, symmetric: bool, shuffle: bool) -> Rounded:
    """A weight rounded in groups; shuffle: input features belong to groups in no order, as act-order leaves them."""
    columns = weight.shape[1]
    groups = torch.arange(columns) // (group if group > 0 else columns)
    if shuffle:
        groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    count, top = int(groups.max()) + 1, 2**bits - 1
    scales, zeros = [], []
    for index in range(count):
        part = weight[:, groups == index].float()
        low, high = part.amin(dim=1).clamp_max(0), part.amax(dim=1).clamp_min(0)
        largest = torch.maximum(-low, high)
        scale = ((2 * largest if symmetric else high - low) / top).clamp_min(1e-6).to(dtype)
        middle = torch.full_like(low, 2 ** (bits - 1))
        zeros.append(middle if symmetric else (-low / scale.float()).round().clamp(0, top))
        scales.append(scale)
    scale, zero = torch.stack(scales, dim=1), torch.stack(zeros, dim=1)
    codes = (weight.float() / scale.float()[:, groups] + zero[:, groups]).round().clamp(0, top)
    return Rounded(codes.long(), scale, zero.long(), groups)


def awq(group: int) -> Callable[[Tensor], Stored]:
    def store(weight: Tensor) -> Stored:
        parts = rounded(weight, 4, group, torch.float16, symmetric=False, shuffle=False)
        order = [8 * block + place for block in range(weight.shape[0] // 8) for place in AWQ_ORDER]
        words = packed_int32(parts.codes.t()[:, order], 4)
        zeros = packed_int32(parts.zeros.t()[:, order], 4)
        return Stored({"qweight": words, "qzeros": zeros, "scales": parts.scales.t()}, parts.weight())

    return store


def gptq(
    bits: int, group: int, *, symmetric: bool = False, act_order: bool = False, exact_zeros: bool = False,
    biases: bool = False,
) -> Callable[[Tensor], Stored]:  # fmt: skip
    def store(weight: Tensor) -> Stored:
        parts = rounded(weight, bits, group, torch.float16, symmetric=symmetric, shuffle=act_order)
        zeros = parts.zeros if exact_zeros else (parts.zeros - 1) % 2**bits
        tensors = {
            "qweight": packed_int32(parts.codes, bits).t(),
            "qzeros": packed_int32(zeros.t(), bits),
            "scales": parts.scales.t(),
            "g_idx": parts.groups.to(torch.int32),
        }
        tensors |= {"bias": torch.zeros(weight.shape[0], dtype=torch.float16)} if biases else {}
        return Stored(tensors, parts.weight())

    return store


def pack_quantized(
    bits: int, group: int, *, symmetric: bool = True, act_order: bool = False
) -> Callable[[Tensor], Stored]:
    def store(weight: Tensor) -> Stored:
        parts = rounded(weight, bits, group, torch.bfloat16, symmetric=symmetric, shuffle=act_order)
        tensors = {
            "weight_packed": packed_int32(parts.codes, bits),
            "weight_scale": parts.scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = packed_int32(parts.zeros.t(), bits).t()
        if act_order:
            tensors["weight_g_idx"] = parts.groups.to(torch.int32)
        return Stored(tensors, parts.weight())

    return store


def int_quantized(weight: Tensor) -> Stored:
    """One scale a row, codes as int8."""
    parts = rounded(weight, 8, -1, torch.bfloat16, symmetric=True, shuffle=False)
    return Stored({"weight": (parts.codes - 128).to(torch.int8), "weight_scale": parts.scales}, parts.weight())


# --- floats -----------------------------------------------------------------------------------------------------------


def fp8_blocks(height: int, width: int, scale_name: str, dtype: torch.dtype) -> Callable[[Tensor], Stored]:
    """One scale for every block; a height or a width of 0 is the whole side."""

    def store(weight: Tensor) -> Stored:
        rows, columns = weight.shape
        tall, wide = height or rows, width or columns
        codes, unpacked = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
        scales = torch.empty(-(-rows // tall), -(-columns // wide), dtype=dtype)
        for top in range(0, rows, tall):
            for left in range(0, columns, wide):
                part = weight[top : top + tall, left : left + wide].float()
                scale = (part.abs().max() / 448).to(dtype)
                code = (part / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
                codes[top : top + tall, left : left + wide] = code
                product = code.float() * scale.float()
                rounded_product = product.to(dtype) if scale_name == "weight_scale" else product
                unpacked[top : top + tall, left : left + wide] = rounded_product
                scales[top // tall, left // wide] = scale
        tensors = {"weight": codes, scale_name: scales if height or width else scales.reshape(())}
        return Stored(tensors | {"input_scale": torch.ones(1)}, unpacked)

    return store


def nf4(*, nested: bool) -> Callable[[Tensor], Stored]:
    table = torch.tensor(NF4)

    def store(weight: Tensor) -> Stored:
        blocks = weight.float().view(-1, 64)
        scales = blocks.abs().amax(dim=1)
        tensors = {"weight.quant_map": table.clone()}
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [*weight.shape]}
        if nested:
            scales = _nested(scales, tensors, state)
        else:
            tensors["weight.absmax"] = scales
        codes = (blocks / scales[:, None])[..., None].sub(table).abs().argmin(dim=-1).flatten()
        pairs = [(first << 4) | second for first, second in codes.view(-1, 2).tolist()]
        tensors["weight"] = torch.tensor(pairs, dtype=torch.uint8)[:, None]
        tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
        unpacked = (table[codes].view(-1, 64) * scales[:, None]).to(torch.bfloat16)
        return Stored(tensors, unpacked.view(weight.shape))

    return store


def _nested(scales: Tensor, tensors: dict[str, Tensor], state: dict[str, Any]) -> Tensor:
    """Scales quantized themselves, 256 at a time, around their mean."""
    offset, table = float(scales.mean()), torch.linspace(-1, 1, 256)
    outer, unpacked, codes = [], [], []
    for part in (scales - offset).split(256):
        outer.append(part.abs().max())
        code = (part / outer[-1])[:, None].sub(table).abs().argmin(dim=1)
        codes.append(code.to(torch.uint8))
        unpacked.append(table[code] * outer[-1] + offset)
    tensors |= {
        "weight.absmax": torch.cat(codes),
        "weight.nested_absmax": torch.stack(outer),
        "weight.nested_quant_map": table.clone(),
    }
    state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    return torch.cat(unpacked)


# --- the table of cases -----------------------------------------------------------------------------------------------


def _compressed(layout: str, bits: int, kind: str) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind}
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


def _gptq(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, **more}


AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
NF4_CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
CASES: dict[str, Case] = {
    "fp8-blocks": Case(fp8_blocks(128, 128, "weight_scale_inv", torch.float32), BLOCKS),
    "fp8-tensor": Case(fp8_blocks(0, 0, "weight_scale", torch.float32), {"quant_method": "fp8"}),
    "fbgemm-fp8": Case(fp8_blocks(1, 0, "weight_scale", torch.float32), {"quant_method": "fbgemm_fp8"}),
    "float-quantized": Case(
        fp8_blocks(1, 0, "weight_scale", torch.bfloat16), _compressed("float-quantized", 8, "float")
    ),
    "int-quantized": Case(int_quantized, _compressed("int-quantized", 8, "int")),
    "w4a16": Case(pack_quantized(4, 64), _compressed("pack-quantized", 4, "int")),
    "w4a16-asymmetric": Case(pack_quantized(4, 32, symmetric=False), _compressed("pack-quantized", 4, "int")),
    "w4a16-act-order": Case(pack_quantized(4, 64, act_order=True), _compressed("pack-quantized", 4, "int")),
    "w8a16": Case(pack_quantized(8, 64), _compressed("pack-quantized", 8, "int")),
    "awq-32": Case(awq(32), AWQ),
    "awq-64": Case(awq(64), AWQ),
    "awq-128": Case(awq(128), AWQ, changes={"intermediate_size": 256}),
    "awq-a-layer-left": Case(awq(32), AWQ | {"modules_to_not_convert": ["layers.0"]}, left=r"layers\.0\."),
    "awq-a-projection-left": Case(awq(32), AWQ, left=r"layers\.1\.self_attn\.k_proj"),
    "gptq": Case(gptq(4, 64), _gptq(4, 64)),
    "gptq-symmetric": Case(gptq(4, 32, symmetric=True, biases=True), _gptq(4, 32)),
    "gptq-act-order": Case(gptq(4, 64, act_order=True), _gptq(4, 64, desc_act=True)),
    "gptq-one-group": Case(gptq(4, -1), _gptq(4, -1)),
    "gptq-v2": Case(gptq(4, 64, exact_zeros=True), _gptq(4, 64, checkpoint_format="gptq_v2")),
    "gptq-8-bits": Case(gptq(8, 64), _gptq(8, 64)),
    "nf4": Case(nf4(nested=False), NF4_CONFIG),
    "nf4-nested": Case(nf4(nested=True), NF4_CONFIG | {"bnb_4bit_use_double_quant": True}),
}
