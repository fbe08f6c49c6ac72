"""The blocks of GGUF files, kept as they are: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, Q4_K, Q5_K and Q6_K, mixed in one
file as llama.cpp mixes them.

On CPUs with the compiled kernels: rows lie side by side in memory instead of one behind the other, every integer and
every scale is the file's. Elsewhere, and where a dtype is named, a file is unpacked (hub/convert.py).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paceline.device.properties import on_host
from paceline.errors import CapabilityError, WeightsError
from paceline.hub.gguf_index import packed_name
from paceline.layers.cpu_kernels import (
    GGUF_KINDS,
    GROUP_SIZE,
    WeightBlocks,
    WeightKind,
    float_blocks,
    library,
    repack_blocks,
)
from paceline.layers.gemm_types import Linear
from paceline.quantization.blocked import BlockedLinear
from paceline.quantization.registry import Tensors

NAME = "gguf"
KINDS = frozenset(GGUF_KINDS)
# Bytes of 32 columns of a row in a file; those of Q4_K to Q6_K are an eighth of a block of 256.
FILE_BYTES = {
    WeightKind.Q4_0: 18, WeightKind.Q4_1: 20, WeightKind.Q5_0: 22, WeightKind.Q5_1: 24, WeightKind.Q8_0: 34,
    WeightKind.IQ4_NL: 18, WeightKind.Q4_K: 18, WeightKind.Q5_K: 22, WeightKind.Q6_K: 26.25,
}  # fmt: skip


def runs_on(device: str) -> bool:
    """Whether products by such blocks exist on a device."""
    return on_host(device) and library() is not None


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
    return BlockedLinear(tuple(_piece(tensors, f"{name}.weight", kind) for name, kind in kinds.items()))


def _kind(tensors: Tensors, name: str) -> WeightKind | None:
    return next((kind for label, kind in GGUF_KINDS.items() if packed_name(name, label) in tensors), None)


def _piece(tensors: Tensors, name: str, kind: WeightKind | None) -> WeightBlocks:
    if kind is None:  # beside quantized ones
        blocks = float_blocks(tensors.raw(name).float().contiguous())
    else:
        stored = tensors.raw(packed_name(name, kind.name))
        blocks = repack_blocks(stored, kind, int(stored.shape[1] / FILE_BYTES[kind] * GROUP_SIZE))
    if blocks is None:
        raise WeightsError(f"the tensor {name} holds values that are no numbers (NaN or infinity)")
    return blocks
