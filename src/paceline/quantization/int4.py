"""int4 weights, converted at load, one scale for every 32 on CPUs and for every 128 on GPUs.

On CPUs through compiled kernels (quantization/blocked.py), or without a compiler through the kernel torch carries for
ARM; both quantize their input too. On GPUs the weights alone are packed (quantization/packed.py).
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.device.properties import on_host
from paceline.errors import CapabilityError, OptionError
from paceline.layers.cpu_kernels import fits_blocks
from paceline.layers.gemm_types import Linear
from paceline.quantization.blocked import block
from paceline.quantization.packed import PackedLinear, pack_weight, round_weight
from paceline.quantization.packed_layout import STEP, Kind
from paceline.quantization.registry import Tensors

GROUP_SIZE = 32


def quantize(weight: Tensor) -> Linear:
    """A weight in int4, for the device it lies on. Raises OptionError where there is no kernel."""
    if not on_host(weight.device):
        return pack_int4(weight)
    return block(weight, 4) if fits_blocks(weight) else _dynamic(weight)


def matches(config: Any) -> bool:
    """No checkpoint is stored this way."""
    return False


def load(tensors: Tensors, names: list[str]) -> Linear:
    """No checkpoint is stored this way."""
    raise CapabilityError("int4 weights are converted at load, not read from a checkpoint")


def pack_int4(weight: Tensor) -> PackedLinear:
    """A weight for a GPU: groups of 128, or of 32 where its rows are no multiple of that."""
    if weight.shape[1] % GROUP_SIZE:
        raise OptionError(f"int4 needs rows of a multiple of {GROUP_SIZE} weights, not {weight.shape[1]}; use int8")
    group_size = GROUP_SIZE if weight.shape[1] % STEP else STEP
    return pack_weight(round_weight(weight, Kind.INT4, group_size))


@dataclass(frozen=True, slots=True, eq=False)
class Int4Linear(Linear):
    """Weights packed for the kernel torch carries for this machine."""

    packed: Tensor
    out_features: int
    in_features: int

    @property
    def quantizes_input(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        out: Tensor = torch.ops.aten._dyn_quant_matmul_4bit(
            x.contiguous(), self.packed, GROUP_SIZE, self.in_features, self.out_features
        )
        return out if bias is None else out + bias

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The product with the identity is the transposed weight; the kernel keeps no other form of it."""
        return self(torch.eye(self.in_features)).t().to(dtype)


def _dynamic(weight: Tensor) -> Int4Linear:
    rows, columns = weight.shape
    if not has_int4_kernel() or columns % GROUP_SIZE:
        raise OptionError("int4 has no kernel for this machine or this model; use --dtype int8")
    groups = weight.float().view(rows, -1, GROUP_SIZE)
    scales = groups.abs().amax(dim=-1) / 7.0
    scales = scales.clamp_min(1e-8)
    values = (groups / scales[..., None]).round().clamp(-8, 7).to(torch.int32).view(rows, columns) + 8
    pairs = (values[:, 1::2] << 4 | values[:, ::2]).to(torch.uint8)
    packed = torch.ops.aten._dyn_quant_pack_4bit_weight(
        pairs, scales.to(torch.bfloat16).view(rows, -1), None, GROUP_SIZE, columns, rows
    )
    return Int4Linear(packed, rows, columns)


def has_int4_kernel() -> bool:
    """Whether torch carries the kernel and this machine runs it fast: ARM with KleidiAI."""
    return platform.machine() in ("aarch64", "arm64") and hasattr(torch.ops.aten, "_dyn_quant_matmul_4bit")
