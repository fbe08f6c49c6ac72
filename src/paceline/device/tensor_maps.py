"""Descriptions of matrices that Hopper's copy unit reads: which box of a matrix goes to shared memory, and how.

A copy by such a map is asked for by one thread, and what other threads ask memory for does not queue behind it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.device.kernel_cache import CompileError

BOX_COLUMNS = 64  # 128 bytes, which the copy spreads over the banks of shared memory
MAP_BYTES = 128
# The driver's numbers for them.
BFLOAT16, NO_INTERLEAVE, SWIZZLE_128_BYTES, PROMOTE_128_BYTES, FILL_WITH_ZEROS = 9, 0, 3, 2, 0


@dataclass(frozen=True, slots=True)
class MatrixMap:
    """A matrix in bfloat16, row by row in memory, and the rows of a box.

    parts: of as many rows each, one behind the other. A box has the same rows of every part.
    box_columns: a multiple of BOX_COLUMNS. So many columns of all rows lie together in a box, then the next ones
    """

    address: int
    rows: int  # of a part
    columns: int
    box_rows: int
    parts: int = 1
    box_columns: int = BOX_COLUMNS


def encode(maps: Sequence[MatrixMap], device: torch.device) -> Tensor:
    """int64 [maps, 16] on the device. Raises CompileError where the driver has no such maps."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        rows = [_encoded(driver, one) for one in maps]
    except (OSError, AttributeError) as error:
        raise CompileError(f"the driver has no tensor maps: {error}") from error
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _encoded(driver: ctypes.CDLL, one: MatrixMap) -> list[int]:
    memory = (ctypes.c_uint64 * (2 * MAP_BYTES // 8))()
    address = -(-ctypes.addressof(memory) // MAP_BYTES) * MAP_BYTES  # the driver asks for a multiple of 64
    row_bytes = one.columns * 2
    result = driver.cuTensorMapEncodeTiled(
        ctypes.c_void_p(address),
        ctypes.c_int(BFLOAT16),
        ctypes.c_uint32(4),
        ctypes.c_void_p(one.address),
        (ctypes.c_uint64 * 4)(BOX_COLUMNS, one.rows, one.parts, one.columns // BOX_COLUMNS),
        (ctypes.c_uint64 * 3)(row_bytes, one.rows * row_bytes, BOX_COLUMNS * 2),
        (ctypes.c_uint32 * 4)(BOX_COLUMNS, one.box_rows, one.parts, one.box_columns // BOX_COLUMNS),
        (ctypes.c_uint32 * 4)(1, 1, 1, 1),
        ctypes.c_int(NO_INTERLEAVE),
        ctypes.c_int(SWIZZLE_128_BYTES),
        ctypes.c_int(PROMOTE_128_BYTES),
        ctypes.c_int(FILL_WITH_ZEROS),
    )
    if result != 0:
        raise CompileError(f"the driver refuses a tensor map of {one}: error {result}")
    return list((ctypes.c_int64 * (MAP_BYTES // 8)).from_address(address))
