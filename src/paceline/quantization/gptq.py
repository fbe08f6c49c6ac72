"""GPTQ: four or eight bits, groups of input features, which act-order spreads over the whole row.

    NAME.qweight  int32 [in_features · bits / 32, out_features]: neighbouring input features share a word
    NAME.qzeros   int32 [groups, out_features · bits / 32]: the zero point less one, in the first version of the layout
    NAME.scales   float16 [groups, out_features]
    NAME.g_idx    int32 [in_features]: the group of each input feature
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.errors import CapabilityError
from paceline.layers.gemm_types import Linear
from paceline.quantization.packed_layout import Kind
from paceline.quantization.quantized_weight import QuantizedWeight, sorted_by_group, unpack_int32
from paceline.quantization.registry import Tensors, quantization_of
from paceline.quantization.stored_linear import load_linear

KINDS = {4: Kind.INT4, 8: Kind.INT8}
EXACT_ZEROS = "gptq_v2"  # the checkpoint_format that stores zero points as they are


def matches(config: Any) -> bool:
    stored = quantization_of(config)
    return stored.get("quant_method") == "gptq" and stored.get("bits") in KINDS


def load(tensors: Tensors, names: list[str]) -> Linear | None:
    """Layers with a qweight; others are stored as they are."""
    return load_linear(_read, tensors, names)


def quantize(weight: Tensor) -> Linear:
    raise CapabilityError("gptq weights are read from a checkpoint, not made at load; use int4")


def _read(tensors: Tensors, name: str) -> QuantizedWeight | None:
    if f"{name}.qweight" not in tensors:
        return None
    kind = KINDS[tensors.quantization["bits"]]
    codes = unpack_int32(tensors.raw(f"{name}.qweight"), kind.bits, dim=0).t()
    scales = tensors.raw(f"{name}.scales").t()
    zeros = _zeros(tensors, name, kind)
    weight = QuantizedWeight(kind, codes, scales, -(-codes.shape[1] // scales.shape[1]), zeros)
    return sorted_by_group(weight, tensors.raw(f"{name}.g_idx")) if f"{name}.g_idx" in tensors else weight


def _zeros(tensors: Tensors, name: str, kind: Kind) -> Tensor | None:
    """Zero points [out_features, groups]; None: all are the offset of the kind."""
    zeros = unpack_int32(tensors.raw(f"{name}.qzeros"), kind.bits, dim=1).t()
    if tensors.quantization.get("checkpoint_format") != EXACT_ZEROS:
        zeros = (zeros.to(torch.int16) + 1) & ((1 << kind.bits) - 1)
    return None if bool((zeros == kind.offset).all()) else zeros
