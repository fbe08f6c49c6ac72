"""The compiled CPU kernels (layers/cpu_kernels.c) as Python calls: blocked weights, their products, whole layers.

Structures mirror those of the C source, field by field.
"""

from __future__ import annotations

import ctypes
import logging
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from paceline.device.host_compiler import compiled_library
from paceline.device.kernel_cache import CompileError
from paceline.device.properties import on_host
from paceline.errors import OutOfMemory

LOG = logging.getLogger("paceline")
SOURCE = Path(__file__).with_suffix(".c")
MACHINES = ("aarch64", "arm64")  # the products are written for NEON
GROUP_SIZE = 32  # weights, or inputs, that share a scale
BLOCK_ROWS = 8
FLOAT_BITS = 32
SCALE_BYTES = 2 * BLOCK_ROWS
LANES = 16  # head_dim is a multiple of it


class CWeight(ctypes.Structure):
    data: Tensor  # behind `blocks`
    _fields_ = [
        ("blocks", ctypes.c_void_p),
        ("bits", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]


class CLayer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("attention_norm", "qkv_bias", "query_norm", "key_norm")),
        *((name, ctypes.c_void_p) for name in ("output_bias", "mlp_norm")),
        *((name, CWeight) for name in ("qkv", "output", "gate_up", "down")),
    ]


class CModel(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(CLayer)),
        ("rope", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("layer_stride", ctypes.c_int64),
        ("hidden_size", ctypes.c_int32),
        ("intermediate_size", ctypes.c_int32),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("num_threads", ctypes.c_int32),
    ]


class CBatch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.POINTER(ctypes.c_int32)) for name in ("lengths", "counts", "skips", "parents", "tables")),
        ("num_rows", ctypes.c_int32),
        ("num_nodes", ctypes.c_int32),
    ]


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None, and a line in the log, where this machine cannot have them."""
    if platform.machine() not in MACHINES:
        return None
    try:
        loaded = compiled_library(SOURCE.read_text())
    except CompileError as error:
        LOG.warning("passes on this CPU run through torch, more slowly: %s; install gcc to change that", error)
        return None
    loaded.paceline_pack.restype = loaded.paceline_unpack.restype = None
    return loaded


@dataclass(frozen=True, slots=True, eq=False)
class WeightBlocks:
    """A weight as the kernels read it.

    4 or 8 bits: eight rows at a time, one scale for every 32 columns. 32 bits: the matrix in float32 as it is.
    """

    data: Tensor  # uint8, or float32 [rows, columns]
    bits: int
    rows: int
    columns: int

    def structure(self) -> CWeight:
        """For the kernels. It keeps the weight alive; a copy inside another structure does not."""
        structure = CWeight(self.data.data_ptr(), self.bits, self.rows, self.columns, 0)
        structure.data = self.data
        return structure


def fits_blocks(weight: Tensor) -> bool:
    """Whether this weight can be blocked, and multiplied here."""
    return weight.shape[1] % GROUP_SIZE == 0 and library() is not None


def float_blocks(weight: Tensor) -> WeightBlocks | None:
    """A weight in floating point for the kernels; None where they do not take it."""
    fits = on_host(weight.device) and weight.dtype == torch.float32 and weight.is_contiguous() and fits_blocks(weight)
    return WeightBlocks(weight, FLOAT_BITS, *weight.shape) if fits else None


def pack_blocks(weight: Tensor, bits: int) -> WeightBlocks:
    """A weight [rows, columns] rounded to 4 or 8 bits; `fits_blocks` says whether it can be."""
    rows, columns = weight.shape
    group_bytes = SCALE_BYTES + BLOCK_ROWS * GROUP_SIZE * bits // 8
    data = torch.empty(-(-rows // BLOCK_ROWS) * (columns // GROUP_SIZE) * group_bytes, dtype=torch.uint8)
    source = weight.float().contiguous()
    _loaded().paceline_pack(_address(source), rows, columns, bits, _address(data), torch.get_num_threads())
    return WeightBlocks(data, bits, rows, columns)


def unpack_blocks(blocks: WeightBlocks) -> Tensor:
    """The weight as it is multiplied, float32 [rows, columns]."""
    out = torch.empty(blocks.rows, blocks.columns)
    _loaded().paceline_unpack(ctypes.byref(blocks.structure()), _address(out))
    return out


def blocks_product(x: Tensor, weight: CWeight, bias: Tensor | None) -> Tensor:
    """x · weightᵀ + bias: float32 [nodes, rows] of float32 inputs. Raises OutOfMemory."""
    assert x.shape[-1] == weight.columns and x.dtype == torch.float32
    x = x.contiguous()
    out = torch.empty(*x.shape[:-1], weight.rows)
    nodes, threads = x.numel() // weight.columns, torch.get_num_threads()
    parts = (ctypes.byref(weight), _address(x), nodes, _address(bias), _address(out), threads)
    check(_loaded().paceline_product(*parts))
    return out


def run_layers(model: CModel, batch: CBatch, hidden_states: Tensor, first: int, last: int) -> None:
    """Layers first to last over hidden_states [nodes, hidden_size], in place. Raises OutOfMemory."""
    model.num_threads = torch.get_num_threads()
    parts = (ctypes.byref(model), ctypes.byref(batch), _address(hidden_states), first, last)
    check(_loaded().paceline_run_layers(*parts))


def check(result: int) -> None:
    if result:
        raise OutOfMemory("a pass does not fit: run fewer sequences at a time, or shorter ones")


def _address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _loaded() -> ctypes.CDLL:
    loaded = library()
    assert loaded is not None, "the caller asks fits_blocks first"
    return loaded
