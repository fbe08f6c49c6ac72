"""int8 weights, converted at load.

On CPUs through compiled kernels (quantization/blocked.py), or without a compiler through torch's dynamic quantization:
a product quantizes its input row by row on the fly. There speculation pays: a pass over eight tokens costs little more
than one over a single token, while in float32 it costs three times as much. On GPUs the weights alone are packed
(quantization/packed.py).
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.device.properties import on_host
from paceline.errors import CapabilityError
from paceline.layers.cpu_kernels import fits_blocks
from paceline.layers.gemm_types import Linear
from paceline.quantization.blocked import block
from paceline.quantization.packed import pack_weight, round_weight
from paceline.quantization.packed_layout import Kind
from paceline.quantization.registry import Tensors

BLOCK_ROWS = 8  # rows the kernels take at a time: a product of 2 rows costs what one of 8 does
MAX_BLOCKED_ROWS = 128  # a longer prompt is one product
RANGE_COLUMNS = 16  # columns added to every matrix; two of them hold the ends of the range
LEVELS, FEW_LEVELS = 127, 63  # largest integers of a weight; of fewer two products with an input fit 16 bits


def quantize(weight: Tensor) -> Linear:
    """A weight in int8, for the device it lies on."""
    if not on_host(weight.device):
        return pack_weight(round_weight(weight, Kind.INT8, weight.shape[1]))
    return block(weight, 8) if fits_blocks(weight) else _dynamic(weight)


def matches(config: Any) -> bool:
    """No checkpoint is stored this way."""
    return False


def load(tensors: Tensors, names: list[str]) -> Linear:
    """No checkpoint is stored this way."""
    raise CapabilityError("int8 weights are converted at load, not read from a checkpoint")


@dataclass(frozen=True, slots=True, eq=False)
class Int8Linear(Linear):
    """Weights in int8, one scale a row, packed for this machine's kernel.

    Rows of the weights are scaled to the range -1 to 1 before packing: kernels with one scale a row are slow on some
    machines, kernels with one scale a matrix are fast on all. The kernel also quantizes its input with one scale for
    all tokens, so a token's numbers would depend on its neighbours. Each token is therefore scaled to that range too,
    and two more columns, 1 and -1, over weights of zero, fix the scale: a token is computed alike alone and among draft
    tokens.

    Products are made of 1 row, of blocks of 8, or of one long prompt: on ARM a packed matrix caches how to multiply for
    two numbers of rows, and working it out for a third takes longer than the product itself.
    """

    packed: Any
    scales: Tensor  # [rows]
    in_features: int

    @property
    def out_features(self) -> int:
        return self.scales.shape[0]

    @property
    def quantizes_input(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        return self.out_features * (self.in_features + RANGE_COLUMNS) + self.scales.nbytes

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        workspace = _workspace(x.shape[0], self.in_features)
        largest = x.abs().amax(dim=-1, keepdim=True).clamp_min_(1e-20)
        torch.div(x, largest, out=workspace.tokens)
        out = self._product(workspace.rows)
        if out.shape[0] > x.shape[0]:
            out = out[: x.shape[0]]
        out = out.mul_(largest).mul_(self.scales)
        return out if bias is None else out + bias

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        weight = torch.ops.quantized.linear_unpack(self.packed)[0].dequantize()
        return (weight[:, : self.in_features] * self.scales[:, None]).to(dtype)

    def _product(self, rows: Tensor) -> Tensor:
        multiply = torch.ops.quantized.linear_dynamic.default
        if rows.shape[0] <= BLOCK_ROWS or rows.shape[0] > MAX_BLOCKED_ROWS:
            out: Tensor = multiply(rows, self.packed, False)
            return out
        return torch.cat([multiply(block, self.packed, False) for block in rows.split(BLOCK_ROWS)])


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """Room for tokens in whole blocks, with the ends of the range set; unused rows hold finite numbers."""

    rows: Tensor  # [whole blocks, columns + RANGE_COLUMNS]
    tokens: Tensor  # the part of it that takes the tokens


class _Workspaces(threading.local):
    """One of each size is enough for a thread."""

    def __init__(self) -> None:
        self.by_size: dict[tuple[int, int], Workspace] = {}


_workspaces = _Workspaces()


def _workspace(tokens: int, columns: int) -> Workspace:
    """Room for so many tokens, kept for the next product of the size unless it is a long prompt's."""
    workspace = _workspaces.by_size.get((tokens, columns))
    if workspace is not None:
        return workspace
    unblocked = tokens == 1 or tokens > MAX_BLOCKED_ROWS
    with torch.inference_mode(False):  # a buffer made inside inference mode could not be written outside of it
        rows = torch.zeros(tokens if unblocked else -(-tokens // BLOCK_ROWS) * BLOCK_ROWS, columns + RANGE_COLUMNS)
        rows[:, columns], rows[:, columns + 1] = 1.0, -1.0
    workspace = Workspace(rows, rows[:tokens, :columns])
    if tokens <= MAX_BLOCKED_ROWS:
        _workspaces.by_size[tokens, columns] = workspace
    return workspace


def _dynamic(weight: Tensor) -> Int8Linear:
    _choose_engine()
    warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*")
    return _packed(weight, FEW_LEVELS if _saturates() else LEVELS)


def _packed(weight: Tensor, levels: int) -> Int8Linear:
    scales = weight.float().abs().amax(dim=1).clamp_min(1e-8)
    scaled = F.pad(weight.float() / scales[:, None], (0, RANGE_COLUMNS))
    quantized = torch.quantize_per_tensor(scaled, 1.0 / levels, 0, torch.qint8)
    return Int8Linear(torch.ops.quantized.linear_prepack(quantized, None), scales, weight.shape[1])


@cache
def _saturates() -> bool:
    """Whether this machine adds pairs of products in 16 bits, which those of the largest weights and inputs do not fit:
    x86-64 without VNNI. Found out by such a product, whatever library multiplies."""
    largest = torch.ones(BLOCK_ROWS, 64)
    product = _packed(largest, LEVELS)(largest)
    return bool((product - 64.0).abs().max() > 0.64)


def _choose_engine() -> None:
    """oneDNN where torch has it (ARM and x86), else what this build prefers."""
    engines = torch.backends.quantized.supported_engines
    if "onednn" in engines and torch.backends.quantized.engine != "onednn":
        torch.backends.quantized.engine = "onednn"
