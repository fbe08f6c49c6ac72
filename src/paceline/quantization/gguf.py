"""The blocks of GGUF files, kept as they are: those of the kinds that layers/cpu_kernels.py names, mixed in one file as
llama.cpp mixes them.

On CPUs with the compiled kernels rows lie side by side in memory instead of one behind the other; on CUDA they lie as
the packed kernel reads them. Every integer and every scale is the file's. Elsewhere, and where a dtype is named, a file
is unpacked: to float32, which holds its numbers exactly, or to that dtype (hub/convert.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from paceline.device.properties import on_host, supports_graphs
from paceline.errors import CapabilityError, WeightsError
from paceline.hub.gguf_index import packed_name
from paceline.layers.cpu_kernels import (
    GGUF_KINDS,
    WeightBlocks,
    WeightKind,
    float_blocks,
    library,
    repack_blocks,
)
from paceline.layers.gemm_types import Linear
from paceline.layers.linear import UnquantizedLinear
from paceline.quantization.blocked import BlockedLinear
from paceline.quantization.gguf_codes import columns_of, read_blocks
from paceline.quantization.packed import PackedLinear, pack_weight
from paceline.quantization.packed_pieces import PackedPieces
from paceline.quantization.quantized_weight import QuantizedWeight, joined
from paceline.quantization.registry import Tensors

NAME = "gguf"
KINDS = frozenset(GGUF_KINDS)
EXPERT = ".experts."  # in the names of weights of one expert


def runs_on(device: str) -> bool:
    """Whether products by such blocks exist on a device."""
    if on_host(device):
        return library() is not None
    return supports_graphs(device) and find_spec("triton") is not None


def matches(config: Any) -> bool:
    """No config says so: the weights are in a GGUF file."""
    return False


def quantize(weight: Tensor) -> Linear:
    """Nothing is converted to it."""
    raise CapabilityError("gguf weights are read from a checkpoint, a .gguf file; convert to int8 or int4 instead")


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeight:
    """A weight as a file has it. kind: of its blocks; None: it is in floating point."""

    name: str
    kind: WeightKind | None
    stored: Tensor


def load(tensors: Tensors, names: list[str]) -> Linear | None:
    """The layers of these names, each in its own blocks; None: all of them are in floating point."""
    kinds = {f"{name}.weight": _kind(tensors, f"{name}.weight") for name in names}
    if all(kind is None for kind in kinds.values()):
        return None
    weights = [StoredWeight(name, kind, tensors.raw(_stored_name(name, kind))) for name, kind in kinds.items()]
    if on_host(weights[0].stored.device):
        return BlockedLinear(tuple(_piece(weight) for weight in weights))
    return _packed(weights, tensors.dtype)


def _kind(tensors: Tensors, name: str) -> WeightKind | None:
    return next((kind for label, kind in GGUF_KINDS.items() if packed_name(name, label) in tensors), None)


def _stored_name(name: str, kind: WeightKind | None) -> str:
    return name if kind is None else packed_name(name, kind.name)


def _piece(weight: StoredWeight) -> WeightBlocks:
    """As the compiled kernels of a CPU read it."""
    if weight.kind is None:  # beside quantized ones
        blocks = float_blocks(weight.stored.float().contiguous())
    else:
        blocks = repack_blocks(weight.stored, weight.kind, columns_of(weight.stored, weight.kind))
    if blocks is None:
        raise WeightsError(f"the tensor {weight.name} holds values that are no numbers (NaN or infinity)")
    return blocks


def _packed(weights: list[StoredWeight], dtype: torch.dtype) -> Linear:
    """As the packed kernel reads them; where one is in floating point, all are unpacked to the model's dtype. So are
    experts: the kernel that multiplies by those of all rows at once reads floating point, one by one they are slow."""
    if any(weight.kind is None or EXPERT in weight.name for weight in weights):
        parts = [
            weight.stored if weight.kind is None else _read(weight, weight.kind).dequantize(dtype)
            for weight in weights
        ]
        return UnquantizedLinear(torch.cat([part.to(dtype) for part in parts]))
    runs = [list(run) for _, run in groupby(weights, key=lambda weight: weight.kind)]
    pieces = [_packed_run(run) for run in runs]
    return pieces[0] if len(pieces) == 1 else PackedPieces(tuple(pieces))


def _packed_run(weights: list[StoredWeight]) -> PackedLinear:
    """Weights of one kind, as one."""
    read = [_read(weight, weight.kind) for weight in weights if weight.kind is not None]
    return pack_weight(joined(read) if len(read) > 1 else read[0])


def _read(weight: StoredWeight, kind: WeightKind) -> QuantizedWeight:
    return read_blocks(weight.stored, kind, weight.name)
