"""Products of up to 16 rows with packed weights in CUDA C++: codes go from memory into the tensor cores' operands.

The kernel (packed_mma.cu) reads the words of quantization/packed_layout.py as they are, so a weight that it does not
take is multiplied by the Triton kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from early_launch import launch_early
from torch import Tensor

from paceline.device.nvrtc import compiled_kernel
from paceline.layers.gemm_types import Epilogue, Gemm, GemmOutput
from paceline.layers.linear_triton import columns_of
from paceline.quantization.packed_layout import STEP, Kind
from paceline.quantization.packed_triton import PackedWeights

MAX_ROWS = 16
ROW_COUNTS = (1, 2, 4, 8, 16)  # what a kernel is compiled for
SHARED_MEMORY = 231_000  # of a block, less what the kernel declares itself
TILE = 16  # output features
MAX_BLOCKS = 1 << 14  # blocks with counters
KINDS = {Kind.INT4: 0, Kind.FP8: 1}


@dataclass(frozen=True, slots=True)
class MmaTiling:
    """How a product is cut. Splits and warps_k decide the order of sums, so they depend on the weight alone.

    tiles    of 16 output features of a warp; 2 with a gate
    warps_m  warps of a block beside each other
    warps_k  warps of a block that share the sums of a tile
    stages   slots of a warp's ring at most, where shared memory has room for so many
    splits   blocks that share the sums of a tile
    """

    tiles: int
    warps_m: int
    warps_k: int
    stages: int
    splits: int

    def per_split(self, steps: int) -> int:
        return -(-steps // self.splits)

    def slot_bytes(self, kind: Kind) -> int:
        """Of a warp's ring: a step of its tiles, and their scales."""
        return self.tiles * (2 * 512 + 32) if kind is Kind.INT4 else self.tiles * 4 * 512


@dataclass(frozen=True, slots=True)
class MmaLaunch:
    """A tiling with what shared memory allows it."""

    stages: int
    shared_bytes: int


def planned(tiling: MmaTiling, kind: Kind, steps: int, row_count: int) -> MmaLaunch | None:
    """None: x and a ring of two slots do not fit shared memory."""
    x_bytes = tiling.per_split(steps) * 2 * STEP * row_count
    stage_bytes = tiling.warps_m * tiling.warps_k * tiling.slot_bytes(kind)
    stages = min(tiling.stages, (SHARED_MEMORY - x_bytes) // stage_bytes)
    return MmaLaunch(stages, x_bytes + stages * stage_bytes) if stages >= 2 else None


def row_count_of(rows: int) -> int:
    return next(count for count in ROW_COUNTS if count >= rows)


@cache
def mma_kernel(kind: Kind, row_count: int, tiling: MmaTiling, flags: tuple[bool, bool, bool], launch: MmaLaunch) -> Any:
    """The compiled kernel. flags: gate, bias, residual. Raises CompileError."""
    gate, bias, residual = flags
    values = {
        "KIND": KINDS[kind],
        "ROWS": row_count,
        "TILES": tiling.tiles,
        "WARPS_M": tiling.warps_m,
        "WARPS_K": tiling.warps_k,
        "STAGES": launch.stages,
        "SPLITS": tiling.splits,
        "GATE": int(gate),
        "BIAS": int(bias),
        "RESIDUAL": int(residual),
    }
    source = Path(__file__).with_name("packed_mma.cu").read_text()
    defines = [f"-D{name}={value}" for name, value in values.items()]
    return compiled_kernel(source, "packed_product", defines, launch.shared_bytes)


@cache
def _blocks_done(device: torch.device) -> Tensor:
    """Counters of blocks that share a tile, zero between kernels."""
    return torch.zeros(MAX_BLOCKS, dtype=torch.int32, device=device)


def launch_mma(
    gemm: Gemm, x: Tensor, linear: PackedWeights, epilogue: Epilogue, tiling: MmaTiling
) -> GemmOutput | None:
    """x, already normed, through a packed linear layer; None: shared memory has no room for it."""
    rows, steps, row_count = x.shape[0], linear.words.shape[0], row_count_of(x.shape[0])
    launch = planned(tiling, linear.kind, steps, row_count)
    if launch is None:
        return None
    flags = (epilogue.gate, epilogue.bias is not None, epilogue.residual is not None)
    kernel = mma_kernel(linear.kind, row_count, tiling, flags, launch)
    blocks = -(-linear.out_features // (TILE * tiling.tiles * tiling.warps_m))
    columns = columns_of(linear.out_features, epilogue)
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    sums_size = tiling.splits * blocks * tiling.warps_m * tiling.tiles * -(-row_count // 8) * 128
    sums = x.new_empty(sums_size if tiling.splits > 1 else 1, dtype=torch.float32)
    tensors = [x, linear.words, linear.scales, gemm.or_none(epilogue.bias), gemm.or_none(epilogue.residual), out]
    sizes = [rows, linear.in_features, linear.out_features, steps, tiling.per_split(steps), columns]
    launch_early(
        kernel,
        (blocks, tiling.splits, 1),
        32 * tiling.warps_m * tiling.warps_k,
        launch.shared_bytes,
        [*tensors, sums, _blocks_done(x.device), *sizes],
    )
    return GemmOutput(out, gemm.none, gemm.none)
