"""The formats of compressed-tensors: packed integers of 4 or 8 bits, int8 and FP8 weights, layers left out at will.

    pack-quantized   NAME.weight_packed int32, eight or four input features a word; NAME.weight_shape; groups may be in
                     act-order (NAME.weight_g_idx); zero points are packed over output features
    int-quantized    NAME.weight int8
    float-quantized  NAME.weight float8_e4m3fn

with NAME.weight_scale in all of them. Where a checkpoint also names how to round activations, inputs stay exact: a
product is at least as exact as that of a kernel which rounds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.errors import CapabilityError
from paceline.layers.gemm_types import Linear
from paceline.quantization.fp8 import read_fp8
from paceline.quantization.packed_layout import Kind
from paceline.quantization.quantized_weight import QuantizedWeight, sorted_by_group, unpack_int32
from paceline.quantization.registry import Tensors, quantization_of
from paceline.quantization.stored_linear import load_linear

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")
BITS = (4, 8)
SIGNED_OFFSET = 128  # from int8 to codes
UNREAD = ("transform_config", "sparsity_config")  # what else a checkpoint may do to its weights


def matches(config: Any) -> bool:
    stored = quantization_of(config)
    if stored.get("quant_method") != "compressed-tensors" or any(_does_something(stored.get(key)) for key in UNREAD):
        return False
    groups = list((stored.get("config_groups") or {}).values())
    return bool(groups) and all(_is_read(group, stored.get("format")) for group in groups)


def load(tensors: Tensors, names: list[str]) -> Linear | None:
    """Layers with scales; others are stored as they are."""
    return load_linear(_read, tensors, names)


def quantize(weight: Tensor) -> Linear:
    raise CapabilityError("compressed-tensors weights are read from a checkpoint, not made at load; use int4 or fp8")


def _does_something(section: Any) -> bool:
    if not section:
        return False
    return bool(section.get("config_groups")) or section.get("format") not in (None, "dense")


def _is_read(group: Mapping[str, Any], common_format: str | None) -> bool:
    weights = group.get("weights") or {}
    return (group.get("format") or common_format) in FORMATS and weights.get("num_bits") in BITS


def _read(tensors: Tensors, name: str) -> QuantizedWeight | None:
    if f"{name}.weight_packed" in tensors:
        return _packed(tensors, name)
    if f"{name}.weight_scale" not in tensors:
        return None
    weight, scales = tensors.raw(f"{name}.weight"), tensors.raw(f"{name}.weight_scale")
    if weight.dtype == torch.float8_e4m3fn:
        return read_fp8(weight, scales, _block(tensors.quantization), name)
    codes = (weight.to(torch.int16) + SIGNED_OFFSET).to(torch.uint8)
    zeros = None
    if f"{name}.weight_zero_point" in tensors:
        stored = tensors.raw(f"{name}.weight_zero_point")
        zeros = _by_row(stored, len(codes)).to(torch.int16) + SIGNED_OFFSET
    return _grouped(tensors, name, QuantizedWeight(Kind.INT8, codes, _by_row(scales, len(codes)), 1, zeros))


def _block(stored: Mapping[str, Any]) -> list[int] | None:
    """The block that shares a scale, where any group of layers has blocks."""
    schemes = [group.get("weights") or {} for group in (stored.get("config_groups") or {}).values()]
    return next((scheme["block_structure"] for scheme in schemes if scheme.get("block_structure")), None)


def _packed(tensors: Tensors, name: str) -> QuantizedWeight:
    packed = tensors.raw(f"{name}.weight_packed")
    rows, columns = tensors.raw(f"{name}.weight_shape").tolist()
    kind = Kind.INT4 if packed.shape[1] * Kind.INT4.codes - columns < Kind.INT4.codes else Kind.INT8
    codes = unpack_int32(packed, kind.bits, dim=1)[:, :columns]
    scales, zeros = _by_row(tensors.raw(f"{name}.weight_scale"), rows), None
    if f"{name}.weight_zero_point" in tensors:
        zeros = unpack_int32(tensors.raw(f"{name}.weight_zero_point"), kind.bits, dim=0)[:rows]
    return _grouped(tensors, name, QuantizedWeight(kind, codes, scales, 1, zeros))


def _grouped(tensors: Tensors, name: str, weight: QuantizedWeight) -> QuantizedWeight:
    """The weight with the size of its groups, and with its columns in the order of groups."""
    sized = replace(weight, group_size=-(-weight.codes.shape[1] // weight.scales.shape[1]))
    if f"{name}.weight_g_idx" not in tensors:
        return sized
    groups = tensors.raw(f"{name}.weight_g_idx")
    return sized if bool((groups < 0).any()) else sorted_by_group(sized, groups)


def _by_row(numbers: Tensor, rows: int) -> Tensor:
    """Numbers of a matrix, of rows or of groups, as [rows, groups]."""
    return numbers.reshape(1, 1).expand(rows, 1) if numbers.numel() == 1 else numbers.view(rows, -1)
