"""bitsandbytes in four bits: NF4 and FP4 tables with one scale for every 64 weights, which may be quantized themselves.

    NAME.weight                                uint8 [weights / 2, 1]: the first of two in the high half
    NAME.weight.quant_map                      float32 [16], what the codes stand for
    NAME.weight.absmax                         float32 [blocks], or uint8 where scales are quantized:
    NAME.weight.nested_absmax, .nested_quant_map   scales of 256 scales, and what their codes stand for
    NAME.weight.quant_state.bitsandbytes__nf4  JSON: shape, block sizes, dtype, the mean of the scales
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from paceline.errors import CapabilityError
from paceline.layers.gemm_types import Linear
from paceline.quantization.packed_layout import Kind
from paceline.quantization.quantized_weight import QuantizedWeight
from paceline.quantization.registry import Tensors, quantization_of
from paceline.quantization.stored_linear import load_linear

TYPES = ("nf4", "fp4")


def matches(config: Any) -> bool:
    stored = quantization_of(config)
    is_four_bits = bool(stored.get("load_in_4bit")) and stored.get("bnb_4bit_quant_type", "fp4") in TYPES
    storage = stored.get("bnb_4bit_quant_storage") or "uint8"
    return is_four_bits and storage == "uint8" and stored.get("quant_method", "bitsandbytes") == "bitsandbytes"


def load(tensors: Tensors, names: list[str]) -> Linear | None:
    """Layers with a table; others are stored as they are."""
    return load_linear(_read, tensors, names)


def quantize(weight: Tensor) -> Linear:
    raise CapabilityError("bitsandbytes weights are read from a checkpoint, not made at load; use int4")


def _read(tensors: Tensors, name: str) -> QuantizedWeight | None:
    prefix = f"{name}.weight"
    if f"{prefix}.quant_map" not in tensors:
        return None
    state = _state(tensors, prefix)
    rows, columns = state["shape"]
    pairs = tensors.raw(prefix).flatten()
    codes = torch.stack([pairs >> 4, pairs & 15], dim=1).flatten()[: rows * columns].view(rows, columns)
    scales, block = _scales(tensors, prefix, state), int(state["blocksize"])
    if columns % block:  # a block goes over the end of a row
        scales, block = scales.repeat_interleave(block)[: rows * columns], 1
    table = tensors.raw(f"{prefix}.quant_map").float()
    rounding = getattr(torch, state["dtype"])
    return QuantizedWeight(Kind.LUT4, codes, scales.view(rows, -1), block, table=table, rounding=rounding)


def _state(tensors: Tensors, prefix: str) -> dict[str, Any]:
    kind = next((kind for kind in TYPES if f"{prefix}.quant_state.bitsandbytes__{kind}" in tensors), TYPES[0])
    document = tensors.raw(f"{prefix}.quant_state.bitsandbytes__{kind}")
    state: dict[str, Any] = json.loads(bytes(document.cpu().tolist()))
    return state


def _scales(tensors: Tensors, prefix: str, state: dict[str, Any]) -> Tensor:
    """One a block, float32."""
    scales = tensors.raw(f"{prefix}.absmax")
    if f"{prefix}.nested_absmax" not in tensors:
        return scales.float()
    table, outer = (tensors.raw(f"{prefix}.{part}").float() for part in ("nested_quant_map", "nested_absmax"))
    by_scale = outer.repeat_interleave(int(state["nested_blocksize"]))[: scales.shape[0]]
    return table[scales.to(torch.int64)] * by_scale + float(state["nested_offset"])
