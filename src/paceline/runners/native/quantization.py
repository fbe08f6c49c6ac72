"""Matrices in fewer bits.

On CPUs int8 through torch's dynamic quantisation, and int4 where the kernel exists: a product quantises its input row
by row on the fly. There this is where guessing pays: a pass over eight tokens costs little more than one over a single
token, while in fp32 it costs three times as much.

On GPUs only the weights have fewer bits (`PackedMatrix`); kernels.packed_kernel unpacks them as they come by. That is
for drafts: half or a quarter of the memory, and errors that cost nothing but acceptance.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import OptionError

INT4_GROUP = 32
WORDS = ("int8", "int4")


BLOCK = 8  # rows the int8 kernels take at a time: a product of 2 rows costs what one of 8 does
LONGEST_IN_BLOCKS = 128  # rows; a longer prompt is one product
PINS = 16  # columns added to every matrix; two of them hold the ends of the range


@dataclass(frozen=True, slots=True, eq=False)
class Int8Matrix:
    """Weights in int8, one scale a row, packed for this machine's kernel.

    Rows of the weights are brought to the range -1 to 1 before packing: kernels that know one scale a row are slow on
    some machines, those that know one a matrix are fast on all. The kernel also quantises its input with one scale for
    all tokens, so a token's numbers would depend on its neighbours. Each token is therefore brought to that range too,
    and two more columns, 1 and -1, over weights of zero, pin the scale: alone or among draft tokens, a token is computed
    alike.

    Products are made of 1 row, of blocks of 8, or of one long prompt: on ARM a packed matrix remembers how to multiply
    for two numbers of rows, and finding it out for a third takes longer than the product itself.
    """

    packed: Any
    scales: Tensor  # [rows]
    columns: int

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        room = workspace(x.shape[0], self.columns)
        largest = x.abs().amax(dim=-1, keepdim=True).clamp_min_(1e-20)
        torch.div(x, largest, out=room.tokens)
        out = self._product(room.rows)
        if out.shape[0] > x.shape[0]:
            out = out[: x.shape[0]]
        out = out.mul_(largest).mul_(self.scales)
        return out if bias is None else out + bias

    def _product(self, ready: Tensor) -> Tensor:
        multiply = torch.ops.quantized.linear_dynamic.default
        if ready.shape[0] <= BLOCK or ready.shape[0] > LONGEST_IN_BLOCKS:
            whole: Tensor = multiply(ready, self.packed, False)
            return whole
        return torch.cat([multiply(block, self.packed, False) for block in ready.split(BLOCK)])


@dataclass(frozen=True, slots=True, eq=False)
class Workspace:
    """Room for tokens in whole blocks, with the pins set; rows that no token takes hold finite numbers."""

    rows: Tensor  # [whole blocks, columns + PINS]
    tokens: Tensor  # the part of it that takes the tokens


class _Workspaces(threading.local):
    """One of each size is enough for a thread."""

    def __init__(self) -> None:
        self.made: dict[tuple[int, int], Workspace] = {}


_workspaces = _Workspaces()


def workspace(tokens: int, columns: int) -> Workspace:
    """Room for so many tokens, kept for the next product of the size unless it is a long prompt's."""
    known = _workspaces.made.get((tokens, columns))
    if known is not None:
        return known
    alone = tokens == 1 or tokens > LONGEST_IN_BLOCKS
    rows = torch.zeros(tokens if alone else -(-tokens // BLOCK) * BLOCK, columns + PINS)
    rows[:, columns], rows[:, columns + 1] = 1.0, -1.0
    made = Workspace(rows, rows[:tokens, :columns])
    if tokens <= LONGEST_IN_BLOCKS:
        _workspaces.made[tokens, columns] = made
    return made


@dataclass(frozen=True, slots=True, eq=False)
class Int4Matrix:
    """Weights in int4, one scale for every 32, packed for the kernel torch carries for this machine."""

    packed: Tensor
    rows: int
    columns: int

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = torch.ops.aten._dyn_quant_matmul_4bit(
            x.contiguous(), self.packed, INT4_GROUP, self.columns, self.rows
        )
        return out if bias is None else out + bias


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """Weights in int8, one scale a row, or in int4, two a byte and one scale for every 32; inputs stay as they are."""

    values: Tensor  # int8 [rows, columns], or uint8 [rows, columns / 2]: the even column in the low half
    scales: Tensor  # float32 [rows, groups]
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1] * 8 // self.bits

    @property
    def group(self) -> int:
        """Columns that share a scale."""
        return self.shape[1] // self.scales.shape[1]

    def whole(self, dtype: torch.dtype) -> Tensor:
        """The matrix as it was, but for rounding."""
        steps = self.values
        if self.bits == 4:
            steps = torch.stack([steps & 15, steps >> 4], dim=-1).flatten(1).to(torch.int8) - 8
        grouped = steps.view(steps.shape[0], self.scales.shape[1], -1)
        return (grouped * self.scales[..., None]).view(self.shape).to(dtype)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, self.whole(x.dtype), bias)


def packed_weights(weight: Tensor, word: str) -> PackedMatrix:
    """A matrix for a GPU in `int8` or `int4`."""
    rows, columns = weight.shape
    bits, group = (8, columns) if word == "int8" else (4, INT4_GROUP)
    if columns % group:
        raise OptionError(f"int4 needs rows of a multiple of {INT4_GROUP} weights, not {columns}; use int8")
    groups = weight.float().view(rows, -1, group)
    most = (1 << (bits - 1)) - 1
    scales = (groups.abs().amax(dim=-1) / most).clamp_min(1e-8)
    steps = (groups / scales[..., None]).round().clamp(-most - 1, most).view(rows, columns)
    if bits == 8:
        return PackedMatrix(steps.to(torch.int8), scales, bits)
    halves = (steps + 8).to(torch.uint8)
    return PackedMatrix((halves[:, 1::2] << 4) | halves[:, ::2], scales, bits)


def rounds_inputs(weight: Any) -> bool:
    """Whether a product with this matrix steps its input to 8 bits too."""
    return isinstance(weight, Int8Matrix | Int4Matrix)


def apply_matrix(weight: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """x · weightᵀ + bias, for a tensor or a packed matrix."""
    return F.linear(x, weight, bias) if isinstance(weight, Tensor) else weight(x, bias)


def packed(weight: Tensor, word: str) -> Any:
    """A matrix in `int8` or `int4`, for the device it lies on."""
    if weight.device.type != "cpu":
        return packed_weights(weight, word)
    return _int8(weight) if word == "int8" else _int4(weight)


def _int8(weight: Tensor) -> Int8Matrix:
    choose_engine()
    warnings.filterwarnings("ignore", message=".*quantized tensor creation functions.*")
    scales = weight.float().abs().amax(dim=1).clamp_min(1e-8)
    ranged = F.pad(weight.float() / scales[:, None], (0, PINS))
    quantization = torch.quantize_per_tensor(ranged, 1.0 / 127.0, 0, torch.qint8)
    return Int8Matrix(torch.ops.quantized.linear_prepack(quantization, None), scales, weight.shape[1])


def choose_engine() -> None:
    """oneDNN where torch has it (ARM and x86), else whatever this build prefers."""
    known = torch.backends.quantized.supported_engines
    if "onednn" in known and torch.backends.quantized.engine != "onednn":
        torch.backends.quantized.engine = "onednn"


def _int4(weight: Tensor) -> Int4Matrix:
    rows, columns = weight.shape
    if not has_int4() or columns % INT4_GROUP:
        raise OptionError("int4 has no kernel for this machine or this model; use --dtype int8")
    groups = weight.float().view(rows, -1, INT4_GROUP)
    scales = groups.abs().amax(dim=-1) / 7.0
    scales = scales.clamp_min(1e-8)
    steps = (groups / scales[..., None]).round().clamp(-8, 7).to(torch.int32).view(rows, columns) + 8
    pairs = (steps[:, 1::2] << 4 | steps[:, ::2]).to(torch.uint8)
    buffer = torch.ops.aten._dyn_quant_pack_4bit_weight(
        pairs, scales.to(torch.bfloat16).view(rows, -1), None, INT4_GROUP, columns, rows
    )
    return Int4Matrix(buffer, rows, columns)


def has_int4() -> bool:
    """Whether torch carries the int4 kernel and this machine runs it fast: ARM with KleidiAI."""
    import platform

    return platform.machine() in ("aarch64", "arm64") and hasattr(torch.ops.aten, "_dyn_quant_matmul_4bit")
