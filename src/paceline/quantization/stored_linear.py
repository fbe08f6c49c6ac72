"""Linear layers of quantized checkpoints.

On a GPU a weight becomes a packed linear layer. On a CPU it is unpacked once, at load: the product is then that of the
weights as the format's own library unpacks them, to the last bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch

from paceline.device.properties import on_host
from paceline.layers.gemm_types import Linear
from paceline.layers.linear import UnquantizedLinear
from paceline.quantization.packed import fits_kernel, pack_weight
from paceline.quantization.quantized_weight import QuantizedWeight, joined
from paceline.quantization.registry import Tensors

LOG = logging.getLogger(__name__)


def load_linear(
    read: Callable[[Tensors, str], QuantizedWeight | None], tensors: Tensors, names: list[str]
) -> Linear | None:
    """Layers joined by rows; None: they are stored in floating point. read: one layer of a format."""
    parts = [read(tensors, name) for name in names]
    weights = [part for part in parts if part is not None]
    if not weights:
        return None
    if len(weights) == len(names) and all(weights[0].joins(weight) for weight in weights[1:]):
        return linear_of(joined(weights) if len(weights) > 1 else weights[0], tensors.dtype)
    unpacked = [
        tensors.raw(f"{name}.weight").to(tensors.dtype) if part is None else part.dequantize(tensors.dtype)
        for name, part in zip(names, parts)
    ]
    return UnquantizedLinear(torch.cat(unpacked))


def linear_of(weight: QuantizedWeight, dtype: torch.dtype) -> Linear:
    """A linear layer for the device that the weight lies on. dtype: of the weight, where it is unpacked."""
    if on_host(weight.codes.device) or not fits_kernel(weight):
        _say_unpacked(weight.kind.name, str(dtype).removeprefix("torch."))
        return UnquantizedLinear(weight.dequantize(dtype))
    return pack_weight(weight)


@cache
def _say_unpacked(kind: str, dtype: str) -> None:
    """Once a process: memory is that of the dtype, which may surprise."""
    LOG.info("weights stored as %s are unpacked to %s: this device has no kernel for them", kind.lower(), dtype)
