"""FP8 (e4m3) weights: read from checkpoints with scales of blocks, rows or matrices, or converted at load.

    NAME.weight            float8_e4m3fn [out_features, in_features]
    NAME.weight_scale_inv  one scale a block, 128 by 128 (DeepSeek, Qwen), or
    NAME.weight_scale      one scale a row [out_features, 1] (FBGEMM), or one for all

Inputs are not rounded: a product is at least as exact as that of a kernel which rounds them to 8 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.errors import WeightsError
from paceline.layers.gemm_types import Linear
from paceline.quantization.packed_layout import Kind
from paceline.quantization.quantized_weight import QuantizedWeight
from paceline.quantization.registry import Tensors, quantization_of
from paceline.quantization.stored_linear import linear_of, load_linear

METHODS = ("fp8", "fbgemm_fp8")
SCALES = ("weight_scale_inv", "weight_scale")
LARGEST = 448.0  # of e4m3
E8M0_BIAS = 127


def matches(config: Any) -> bool:
    """Checkpoints of DeepSeek, Qwen and others, and of FBGEMM."""
    return quantization_of(config).get("quant_method") in METHODS


def load(tensors: Tensors, names: list[str]) -> Linear | None:
    """Layers whose weight is in FP8; others are stored as they are."""
    return load_linear(_read, tensors, names)


def quantize(weight: Tensor) -> Linear:
    """One scale a row."""
    scales = (weight.float().abs().amax(dim=1, keepdim=True) / LARGEST).clamp_min(1e-12)
    codes = (weight.float() / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    return linear_of(QuantizedWeight(Kind.FP8, codes, scales, weight.shape[1]), weight.dtype)


def _read(tensors: Tensors, name: str) -> QuantizedWeight | None:
    scales = next((f"{name}.{suffix}" for suffix in SCALES if f"{name}.{suffix}" in tensors), None)
    if scales is None:
        return None
    weight = tensors.raw(f"{name}.weight")
    if weight.dtype != torch.float8_e4m3fn:
        kind = str(weight.dtype).removeprefix("torch.")
        raise WeightsError(f"the weights of {name} are {kind}; FP8 checkpoints are read in float8_e4m3fn")
    return read_fp8(weight, _as_float(tensors.raw(scales)), tensors.quantization.get("weight_block_size"), name)


def read_fp8(weight: Tensor, scales: Tensor, block: list[int] | None, name: str) -> QuantizedWeight:
    """A weight with its scales, which may be of blocks, rows or the whole of it. Raises WeightsError."""
    rows, columns = weight.shape
    codes = weight.view(torch.uint8)
    if scales.numel() == 1:
        return QuantizedWeight(Kind.FP8, codes, scales.reshape(1, 1).expand(rows, 1), columns)
    grid = scales if scales.dim() == 2 else scales.view(-1, 1)
    height, width = -(-rows // grid.shape[0]), -(-columns // grid.shape[1])
    if block is not None and grid.shape[0] != rows:
        height, width = block
    if grid.shape != (-(-rows // height), -(-columns // width)):
        raise WeightsError(f"the scales of {name} are {tuple(scales.shape)}, which does not fit {tuple(weight.shape)}")
    return QuantizedWeight(Kind.FP8, codes, grid.repeat_interleave(height, dim=0)[:rows], width)


def _as_float(scales: Tensor) -> Tensor:
    """Scales in float32; powers of two may be stored as their exponents alone."""
    if scales.dtype == torch.uint8:
        return (scales.float() - E8M0_BIAS).exp2()
    return scales.float()
