"""The blocks of GGUF files, kept as they are: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, Q4_K, Q5_K and Q6_K, mixed in one
file as llama.cpp mixes them.

On CPUs with the compiled kernels rows lie side by side in memory instead of one behind the other; on CUDA they lie as
the packed kernel reads them. Every integer and every scale is the file's. Elsewhere, and where a dtype is named, a file
is unpacked: to float32, which holds its numbers exactly, or to that dtype (hub/convert.py).
"""

from __future__ import annotations

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
from paceline.quantization.quantized_weight import joined
from paceline.quantization.registry import Tensors

NAME = "gguf"
KINDS = frozenset(GGUF_KINDS)


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


def load(tensors: Tensors, names: list[str]) -> Linear | None:
    """The layers of these names, each in its own blocks; None: all of them are in floating point."""
    kinds = {name: _kind(tensors, f"{name}.weight") for name in names}
    if all(kind is None for kind in kinds.values()):
        return None
    if not on_host(tensors.device):
        return packed(tensors, kinds)
    return BlockedLinear(tuple(_piece(tensors, f"{name}.weight", kind) for name, kind in kinds.items()))


def packed(tensors: Tensors, kinds: dict[str, WeightKind | None]) -> Linear:
    """Layers as the packed kernel reads them; where one is in floating point, all are unpacked to the model's dtype."""
    runs = [(kind, [name for name, _ in run]) for kind, run in groupby(kinds.items(), key=lambda item: item[1])]
    pieces = [_packed_run(tensors, kind, names) for kind, names in runs if kind is not None]
    if len(pieces) == len(runs):
        return pieces[0] if len(pieces) == 1 else PackedPieces(tuple(pieces))
    unpacked = [
        tensors.raw(f"{name}.weight").to(tensors.dtype)
        if kind is None
        else _packed_run(tensors, kind, [name]).dequantize(tensors.dtype)
        for name, kind in kinds.items()
    ]
    return UnquantizedLinear(torch.cat(unpacked))


def _packed_run(tensors: Tensors, kind: WeightKind, names: list[str]) -> PackedLinear:
    """Layers of one kind, as one."""
    weights = [f"{name}.weight" for name in names]
    read = [read_blocks(tensors.raw(packed_name(weight, kind.name)), kind, weight) for weight in weights]
    return pack_weight(joined(read) if len(read) > 1 else read[0])


def _kind(tensors: Tensors, name: str) -> WeightKind | None:
    return next((kind for label, kind in GGUF_KINDS.items() if packed_name(name, label) in tensors), None)


def _piece(tensors: Tensors, name: str, kind: WeightKind | None) -> WeightBlocks:
    if kind is None:  # beside quantized ones
        blocks = float_blocks(tensors.raw(name).float().contiguous())
    else:
        stored = tensors.raw(packed_name(name, kind.name))
        blocks = repack_blocks(stored, kind, columns_of(stored, kind))
    if blocks is None:
        raise WeightsError(f"the tensor {name} holds values that are no numbers (NaN or infinity)")
    return blocks
