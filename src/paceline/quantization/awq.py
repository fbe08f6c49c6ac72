"""AWQ: four bits, zero points, groups of input features, in the layout called gemm.

    NAME.qweight  int32 [in_features, out_features / 8]
    NAME.qzeros   int32 [groups, out_features / 8]
    NAME.scales   float16 [groups, out_features]

A word holds eight output features, in the order 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.errors import CapabilityError
from paceline.layers.gemm_types import Linear
from paceline.quantization.packed_layout import Kind
from paceline.quantization.quantized_weight import QuantizedWeight, unpack_int32
from paceline.quantization.registry import Tensors, quantization_of
from paceline.quantization.stored_linear import load_linear

BITS = 4
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of the output features 0 to 7 in a word


def matches(config: Any) -> bool:
    stored = quantization_of(config)
    version = str(stored.get("version") or "gemm").lower()
    return stored.get("quant_method") == "awq" and stored.get("bits", BITS) == BITS and version == "gemm"


def load(tensors: Tensors, names: list[str]) -> Linear | None:
    """Layers with a qweight; others are stored as they are."""
    return load_linear(_read, tensors, names)


def quantize(weight: Tensor) -> Linear:
    raise CapabilityError("awq weights are read from a checkpoint, not made at load; use int4")


def _read(tensors: Tensors, name: str) -> QuantizedWeight | None:
    if f"{name}.qweight" not in tensors:
        return None
    codes = _in_order(tensors.raw(f"{name}.qweight"))
    zeros, scales = _in_order(tensors.raw(f"{name}.qzeros")), tensors.raw(f"{name}.scales")
    group_size = codes.shape[0] // scales.shape[0]
    return QuantizedWeight(Kind.INT4, codes.t(), scales.t(), group_size, zeros.t())


def _in_order(packed: Tensor) -> Tensor:
    """Words as codes, with output features in their order. [rows, out_features]"""
    codes = unpack_int32(packed, BITS, dim=1).view(packed.shape[0], -1, len(PLACES))
    return codes[:, :, torch.tensor(PLACES, device=packed.device)].flatten(1)
