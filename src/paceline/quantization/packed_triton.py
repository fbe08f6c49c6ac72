"""Launch of the kernel for packed weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.device.properties import on_host
from paceline.layers.gemm_types import Epilogue, Gemm, GemmOutput
from paceline.layers.linear_triton import columns_of
from paceline.quantization.packed_kernel import packed_kernel, unpack_kernel
from paceline.quantization.packed_layout import STEP, Kind
from paceline.quantization.quantized_weight import BlockScales

PROGRAMS = 1184  # of a product at most, where its sums are shared: nine on each multiprocessor of an H200
SPLIT_COLUMNS = 64  # columns of the tile that splits are counted with
MAX_SPLITS = 16
TILE_ROWS = (16, 32, 64)
SPLIT_STEPS = 4  # of a program at least
COLUMNS, WARPS = 128, 4  # of a program
STAGES = 3
PREFETCH = 2  # steps
FAST_KINDS = (Kind.INT2, Kind.INT3, Kind.INT4, Kind.INT5, Kind.INT6, Kind.INT8, Kind.FP8, Kind.FP4)
UNPACK_ROWS = 32  # of one program
TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
MAX_TILES = 1 << 17  # tiles with counters
NO_BLOCK = BlockScales()


class PackedWeights(Protocol):
    """What the kernel reads of a packed linear layer."""

    @property
    def words(self) -> Tensor: ...

    @property
    def scales(self) -> Tensor: ...

    @property
    def zeros(self) -> Tensor | None: ...

    @property
    def table(self) -> Tensor | None: ...

    @property
    def high(self) -> Tensor | None: ...

    @property
    def block(self) -> BlockScales | None: ...

    @property
    def kind(self) -> Kind: ...

    @property
    def order(self) -> Tensor | None: ...

    @property
    def rounding(self) -> torch.dtype | None: ...

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...

    @property
    def group_size(self) -> int: ...

    @property
    def groups(self) -> int: ...


@dataclass(frozen=True, slots=True)
class PackedTiling:
    """How a product is cut. The splits decide the order of sums, so they depend on the weight alone."""

    rows: int
    columns: int
    splits: int
    steps_per_split: int
    warps: int
    stages: int = STAGES
    prefetch: int = PREFETCH


def packed_tiling(out_features: int, steps: int, rows: int, *, gate: bool, blocks: bool = False) -> PackedTiling:
    """Many programs a multiprocessor hide each other's waits; few steps a program hide nothing (docs/log.md).

    blocks: weights in blocks of GGUF, whose further sums do not fit the registers of four warps beside many rows.
    """
    tiles = triton.cdiv(out_features, SPLIT_COLUMNS)
    splits = max(1, min(MAX_SPLITS, steps // SPLIT_STEPS, PROGRAMS // tiles))
    per_split = triton.cdiv(steps, splits)
    tile_rows = next((size for size in TILE_ROWS if size >= rows), TILE_ROWS[-1])
    columns = COLUMNS // 2 if gate else COLUMNS
    warps = 2 * WARPS if blocks and not gate and tile_rows > TILE_ROWS[0] else WARPS
    return PackedTiling(tile_rows, columns, triton.cdiv(steps, per_split), per_split, warps)


@cache
def _programs_done(device: torch.device) -> Tensor:
    """Counters of programs that share a tile, zero between kernels. One set for all products of a device."""
    return torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


def launch_packed(
    gemm: Gemm,
    x: Tensor,
    linear: PackedWeights,
    epilogue: Epilogue,
    tile: PackedTiling | None = None,
    *,
    out: Tensor | None = None,
) -> GemmOutput:
    """x, already normed, through a packed linear layer.

    tile  another than the usual one
    out   where the product goes, which may be some columns of a larger one; a residual is then as wide as that
    """
    columns, rows, steps = columns_of(linear.out_features, epilogue), x.shape[0], linear.words.shape[1]
    blocks = linear.block is not None
    tile = tile or packed_tiling(linear.out_features, steps, rows, gate=epilogue.gate, blocks=blocks)
    output = gemm.buffers(x, columns, tile.columns, epilogue) if out is None else GemmOutput(out, gemm.none, gemm.none)
    shared, fast, block = tile.splits > 1, _is_fast(x, linear), linear.block or NO_BLOCK
    sums = x.new_empty(tile.splits, rows, linear.out_features, dtype=torch.float32) if shared else gemm.none
    packed_kernel[(triton.cdiv(columns, tile.columns), tile.splits, triton.cdiv(rows, tile.rows))](
        x, linear.words, gemm.or_none(linear.high), linear.scales, gemm.or_none(linear.zeros),
        gemm.or_none(_minimums(linear, block)), gemm.or_none(block.outer_scales), gemm.or_none(block.outer_minimums),
        gemm.or_none(linear.table), gemm.or_none(epilogue.bias), gemm.or_none(epilogue.residual),
        output.out, output.best_value, output.best_index, sums, _programs_done(x.device) if shared else gemm.none,
        rows, columns, output.out.stride(0), linear.in_features, steps, tile.steps_per_split,
        *_spans(linear, block),
        FAST=fast, GROUP=0 if linear.groups == 1 and linear.block is None else linear.group_size,
        EVEN=linear.in_features % STEP == 0, **_constants(linear, block),
        SPLITS=tile.splits, PREFETCH=tile.prefetch if fast else 0, ROWS=tile.rows, COLUMNS=tile.columns,
        num_warps=tile.warps, num_stages=tile.stages, **gemm.flags(epilogue),
    )
    return output


def _is_fast(x: Tensor, linear: PackedWeights) -> bool:
    """Whether codes are decoded two at a time: the machine's own instructions, for bfloat16."""
    plain = linear.kind not in FAST_KINDS or (linear.kind is Kind.INT8 and linear.zeros is not None)
    return x.dtype == torch.bfloat16 and not on_host(x.device) and not plain


def _constants(linear: PackedWeights, block: BlockScales) -> dict[str, int | bool]:
    """What both kernels know of a weight when they are compiled."""
    return {
        "KIND": int(linear.kind),
        "HIGH": linear.high is not None,
        "ZEROS": linear.zeros is not None,
        "MINIMUMS": block.has_minimums,
        "NIBBLES": block.nibbles,
        "OUTER": block.outer_scales is not None,
        "GROUPS": linear.scales.shape[-1],
        "WORDS": linear.kind.words,
        "CODES": linear.kind.codes,
    }


def _minimums(linear: PackedWeights, block: BlockScales) -> Tensor | None:
    return linear.scales if block.nibbles else block.minimums


def _spans(linear: PackedWeights, block: BlockScales) -> tuple[int, int]:
    """Of the scales, and of those around them."""
    return linear.scales.shape[1], 1 if block.outer_scales is None else block.outer_scales.shape[1]


def unpack(linear: PackedWeights, dtype: torch.dtype, places: Tensor | None = None) -> Tensor:
    """The weight [out_features, in_features] of a packed linear layer, for products of many rows.

    places: int64, the rows to unpack instead of all.
    """
    rows, block = linear.out_features if places is None else places.shape[0], linear.block or NO_BLOCK
    out = torch.empty(rows, linear.in_features, dtype=dtype, device=linear.words.device)
    steps = linear.words.shape[1]
    unpack_kernel[(triton.cdiv(rows, UNPACK_ROWS), steps)](
        linear.words, _or(linear.high, out), linear.scales, _or(linear.zeros, out),
        _or(_minimums(linear, block), out), _or(block.outer_scales, out), _or(block.outer_minimums, out),
        _or(linear.table, out), _or(linear.order, out), _or(places, out), out,
        rows, linear.in_features, steps, *_spans(linear, block),
        ORDER=linear.order is not None, SOME=places is not None, GROUP=linear.group_size,
        ROUNDING=TRITON_DTYPES[linear.rounding or linear.scales.dtype], ROWS=UNPACK_ROWS, **_constants(linear, block),
    )
    return out


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """The tensor, or another that stands for one which the kernel does not read."""
    return other if tensor is None else tensor
