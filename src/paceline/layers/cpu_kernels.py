"""The compiled CPU kernels (layers/cpu_kernels.c) as Python calls: blocked weights, their products, whole layers.

Structures mirror those of the C source, field by field.
"""

from __future__ import annotations

import ctypes
import logging
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from paceline.device.host_compiler import compiled_library
from paceline.device.kernel_cache import CompileError
from paceline.device.memory import weight_buffer
from paceline.device.properties import on_host
from paceline.errors import OutOfMemory

LOG = logging.getLogger("paceline")
GROUP_SIZE = 32  # weights, or inputs, that share a scale
BLOCK_ROWS = 8
SCALE_BYTES = 2 * BLOCK_ROWS
LANES = 16  # head_dim is a multiple of it
VECTOR = 8  # floats of the widest vector
MAX_PIECES = 3  # of a linear layer: queries, keys and values


@dataclass(frozen=True, slots=True)
class Machine:
    """What the sources of a kind of machine end in, and how they are compiled."""

    instructions: str
    options: tuple[str, ...] = ()


X86 = Machine("x86", ("-O2",))  # as fast as -O3 here, and compiled in a third of the time
MACHINES = {"aarch64": Machine("neon"), "arm64": Machine("neon"), "x86_64": X86, "AMD64": X86}


class WeightKind(IntEnum):
    """How a weight is stored. Those behind INT8 are named as in GGUF files."""

    FLOAT32 = 0
    INT4 = 1
    INT8 = 2
    Q4_0 = 3
    Q4_1 = 4
    Q5_0 = 5
    Q5_1 = 6
    Q8_0 = 7
    IQ4_NL = 8
    Q4_K = 9
    Q5_K = 10
    Q6_K = 11
    IQ4_XS = 12
    Q3_K = 13
    Q2_K = 14


GGUF_KINDS = {kind.name: kind for kind in WeightKind if kind > WeightKind.INT8}


class CWeight(ctypes.Structure):
    _fields_ = [
        ("blocks", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    ]


class CLinear(ctypes.Structure):
    _fields_ = [("pieces", CWeight * MAX_PIECES), ("count", ctypes.c_int32), ("rows", ctypes.c_int32)]


class CLayer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("attention_norm", "qkv_bias", "query_norm", "key_norm")),
        *((name, ctypes.c_void_p) for name in ("output_bias", "mlp_norm")),
        *((name, CLinear) for name in ("qkv", "output", "gate_up", "down")),
    ]


class CModel(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(CLayer)),
        ("rope", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("layer_stride", "slot_stride", "head_stride")),
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
    machine = MACHINES.get(platform.machine())
    if machine is None:
        return None
    try:
        return compile_kernels(machine)
    except CompileError as error:
        LOG.warning("passes on this CPU run through torch, more slowly: %s; install gcc to change that", error)
        return None


def compile_kernels(machine: Machine) -> ctypes.CDLL:
    """The C sources as one; cpu_kernels.c says what is in each. Raises CompileError."""
    names = (
        f"cpu_vectors_{machine.instructions}", "cpu_kernels", f"cpu_products_{machine.instructions}", "cpu_products",
        "cpu_layers", "cpu_gguf", "cpu_block", "cpu_selector",
    )  # fmt: skip
    source = "\n".join(Path(__file__).with_name(f"{name}.c").read_text() for name in names)
    loaded = compiled_library(source, machine.options)
    loaded.paceline_pack.restype = loaded.paceline_norm.restype = None
    loaded.paceline_block_bytes.restype = ctypes.c_int64
    return loaded


@dataclass(frozen=True, slots=True, eq=False)
class WeightBlocks:
    """A weight as the kernels read it: eight rows at a time, or the matrix in float32 as it is."""

    data: Tensor  # uint8, or float32 [rows, columns]
    kind: WeightKind
    rows: int
    columns: int

    def structure(self) -> CWeight:
        """For the kernels. It does not keep the weight alive."""
        return CWeight(self.data.data_ptr(), self.kind, self.rows, self.columns, 0)


def joined(pieces: Sequence[WeightBlocks]) -> CLinear:
    """Weights with the same input, joined by rows. Does not keep them alive."""
    assert 0 < len(pieces) <= MAX_PIECES and len({piece.columns for piece in pieces}) == 1
    structures = (CWeight * MAX_PIECES)(*(piece.structure() for piece in pieces))
    return CLinear(structures, len(pieces), sum(piece.rows for piece in pieces))


def fits_blocks(weight: Tensor) -> bool:
    """Whether this weight can be blocked, and multiplied here."""
    return weight.shape[1] % GROUP_SIZE == 0 and library() is not None


def float_blocks(weight: Tensor) -> WeightBlocks | None:
    """A weight in floating point for the kernels; None where they do not take it."""
    fits = on_host(weight.device) and weight.dtype == torch.float32 and weight.is_contiguous() and fits_blocks(weight)
    return WeightBlocks(weight, WeightKind.FLOAT32, *weight.shape) if fits else None


def pack_blocks(weight: Tensor, bits: int) -> WeightBlocks:
    """A weight [rows, columns] rounded to 4 or 8 bits; `fits_blocks` says whether it can be."""
    blocks = _empty_blocks(WeightKind.INT4 if bits == 4 else WeightKind.INT8, *weight.shape)
    source, threads = weight.float().contiguous(), torch.get_num_threads()
    _loaded().paceline_pack(_address(source), blocks.rows, blocks.columns, bits, _address(blocks.data), threads)
    return blocks


def repack_blocks(stored: Tensor, kind: WeightKind, columns: int) -> WeightBlocks | None:
    """Rows of a GGUF file, uint8 [rows, bytes]: their integers and scales unchanged. None: a scale is no number."""
    blocks, stored = _empty_blocks(kind, stored.shape[0], columns), stored.contiguous()
    source = (_address(stored), ctypes.c_int64(stored.shape[1]))
    parts = (kind.value, blocks.rows, columns, _address(blocks.data), torch.get_num_threads())
    return None if _loaded().paceline_repack(*source, *parts) else blocks


def _empty_blocks(kind: WeightKind, rows: int, columns: int) -> WeightBlocks:
    """As many bits a weight as in a file, or an eighth of a bit more."""
    size = -(-rows // BLOCK_ROWS) * _loaded().paceline_block_bytes(kind.value, columns)
    return WeightBlocks(weight_buffer(size), kind, rows, columns)


def unpack_blocks(blocks: WeightBlocks, rows: Tensor | None = None) -> Tensor:
    """The weight as it is multiplied, float32 [rows, columns]. rows: int64, those to unpack instead of all."""
    places = None if rows is None else rows.contiguous()
    count = blocks.rows if places is None else places.numel()
    out = torch.empty(count, blocks.columns)
    structure = ctypes.byref(blocks.structure())
    if _loaded().paceline_unpack(structure, _address(places), ctypes.c_int64(count), _address(out)):
        raise IndexError(f"a weight of {blocks.rows} rows has no such row")
    return out


def blocks_product(x: Tensor, linear: CLinear, bias: Tensor | None) -> Tensor:
    """x · weightᵀ + bias: float32 [nodes, rows] of float32 inputs. Raises OutOfMemory."""
    columns = linear.pieces[0].columns
    assert x.shape[-1] == columns and x.dtype == torch.float32
    x = x.contiguous()
    out = torch.empty(*x.shape[:-1], linear.rows)
    nodes, threads = x.numel() // columns, torch.get_num_threads()
    parts = (ctypes.byref(linear), _address(x), nodes, _address(bias), _address(out), threads)
    check(_loaded().paceline_product(*parts))
    return out


def norm_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Every row of x divided by its root mean square, times weight. Both float32; rows are a multiple of LANES."""
    x, size = x.contiguous(), x.shape[-1]
    assert size % LANES == 0 and x.dtype == weight.dtype == torch.float32
    out = torch.empty_like(x)
    rows = ctypes.c_int64(x.numel() // size)
    _loaded().paceline_norm(_address(x), _address(weight), rows, size, ctypes.c_float(eps), _address(out))
    return out


def run_layers(
    model: CModel, batch: CBatch, hidden_states: Tensor, first: int, last: int, feature_layers: Sequence[int] = ()
) -> Tensor | None:
    """Layers first to last over hidden_states [nodes, hidden_size], in place. Raises OutOfMemory.

    Returns what enters the feature layers, [nodes, layers · hidden_size]; `last` stands for what leaves the last one.
    """
    model.num_threads = torch.get_num_threads()
    nodes, size = hidden_states.shape
    features = torch.empty(nodes, len(feature_layers) * size) if feature_layers else None
    layers = (ctypes.c_int32 * len(feature_layers))(*feature_layers)
    parts = (ctypes.byref(model), ctypes.byref(batch), _address(hidden_states), first, last)
    check(_loaded().paceline_run_layers(*parts, layers, len(feature_layers), _address(features)))
    return features


def check(result: int) -> None:
    if result:
        raise OutOfMemory("a pass does not fit: run fewer sequences at a time, or shorter ones")


def _address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def _loaded() -> ctypes.CDLL:
    loaded = library()
    assert loaded is not None, "the caller asks fits_blocks first"
    return loaded
