"""MXFP4: four-bit floats (e2m1) with one power of two for every 32, as gpt-oss stores its experts.

    NAME_blocks  uint8 [experts, out_features, in_features / 32, 16]: the first of two in the low half
    NAME_scales  uint8 [experts, out_features, in_features / 32]: the exponent plus 127

Layers that are not experts are stored in floating point. On a GPU experts stay as they are (layers/mxfp4_experts.py);
on a CPU they are unpacked, since a product of four-bit floats would unpack them every time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.errors import CapabilityError
from paceline.layers.gemm_types import Linear
from paceline.layers.moe import Matrices
from paceline.layers.mxfp4_experts import Mxfp4Matrices, unpacked
from paceline.quantization.registry import Tensors, quantization_of


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


def load_experts(tensors: Tensors, name: str, *, packed: bool) -> Matrices:
    """Experts of a checkpoint, [experts, out_features, in_features]: as they are, or in the model's dtype."""
    blocks, exponents = tensors.raw(f"{name}_blocks"), tensors.raw(f"{name}_scales")
    codes = blocks.flatten(2)
    if packed:
        return Mxfp4Matrices(codes, exponents, tensors.dtype)
    experts, rows, pairs = codes.shape
    out = torch.empty(experts, rows, 2 * pairs, dtype=tensors.dtype, device=codes.device)
    for expert in range(experts):  # one at a time: the numbers of all in float32 may not fit
        out[expert] = unpacked(codes[expert], exponents[expert], tensors.dtype)
    return out
