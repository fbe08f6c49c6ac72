"""MXFP4: four-bit floats (e2m1) with one power of two for every 32, as gpt-oss stores its experts.

    NAME_blocks  uint8 [experts, out_features, in_features / 32, 16]: the first of two in the low half
    NAME_scales  uint8 [experts, out_features, in_features / 32]: the exponent plus 127

Layers that are not experts are stored in floating point.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.errors import CapabilityError
from paceline.layers.gemm_types import Linear
from paceline.quantization.packed_layout import FP4_VALUES
from paceline.quantization.registry import Tensors, quantization_of

EXPONENT_BIAS = 127


def matches(config: Any) -> bool:
    return quantization_of(config).get("quant_method") == "mxfp4"


def load(tensors: Tensors, names: list[str]) -> Linear | None:
    """None: the linear layers of such a checkpoint are not quantized, only its experts."""
    return None


def quantize(weight: Tensor) -> Linear:
    raise CapabilityError("mxfp4 weights are read from a checkpoint, not made at load; use int4")


def is_packed(tensors: Tensors, name: str) -> bool:
    """Whether the experts of this name are stored in MXFP4."""
    return f"{name}_blocks" in tensors


def load_experts(tensors: Tensors, name: str) -> Tensor:
    """Experts of a checkpoint in the model's dtype. [experts, out_features, in_features]"""
    return unpack_experts(tensors.raw(f"{name}_blocks"), tensors.raw(f"{name}_scales"), tensors.dtype)


def unpack_experts(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Blocks of codes and their exponents as numbers, one expert at a time. [experts, out_features, in_features]"""
    table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)], device=blocks.device)
    experts, rows, groups, pairs = blocks.shape
    out = torch.empty(experts, rows, groups * pairs * 2, dtype=dtype, device=blocks.device)
    for expert in range(experts):
        codes = torch.stack([blocks[expert] & 15, blocks[expert] >> 4], dim=-1).flatten(-2)  # [rows, groups, 32]
        factors = (scales[expert].float() - EXPONENT_BIAS).exp2()
        out[expert] = (table[codes.to(torch.int64)] * factors[..., None]).flatten(1)
    return out
