"""Random packed weights of every format that the kernel of a whole pass reads."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.layers.weight_pieces import PieceFormat
from paceline.quantization.packed import PackedLinear
from paceline.quantization.packed_layout import STEP, Kind, pack_words, tiled
from paceline.quantization.quantized_weight import OUTER_GROUP, BlockScales


def random_packed(form: PieceFormat, rows: int, columns: int, device: str) -> PackedLinear:
    """A weight whose numbers are some hundredths."""
    if form is PieceFormat.FP8:
        return _fp8(rows, columns, device)
    steps = columns // STEP
    words = tiled(_integers(-(2**31), 2**31, rows, steps * 16, torch.int32, device), 16)
    if form is PieceFormat.INT4:
        scales = tiled(_around(0.006, rows, steps, device).bfloat16(), 1)
        return PackedLinear(words, scales, Kind.INT4, STEP, columns, rows)
    outer = tiled(_around(1.5e-4, rows, columns // OUTER_GROUP, device).half(), 1)
    if form is PieceFormat.Q4_K:
        scales, minimums = (_integers(20, 64, rows, columns // 32, torch.uint8, device) for _ in range(2))
        block = BlockScales(tiled(minimums, 4), outer, -outer * 8)
        return PackedLinear(words, tiled(scales, 4), Kind.INT4, 32, columns, rows, rounding=torch.float32, block=block)
    scales = tiled(_integers(-100, 101, rows, columns // 16, torch.int8, device), 8)
    high = tiled(_integers(-(2**15), 2**15, rows, steps * 16, torch.int16, device), 16)
    block = BlockScales(None, outer / 8)
    return PackedLinear(words, scales, Kind.INT6, 16, columns, rows, rounding=torch.float32, high=high, block=block)


def _fp8(rows: int, columns: int, device: str) -> PackedLinear:
    signs = torch.randint(0, 2, (rows, columns), dtype=torch.uint8, device=device) << 7
    codes = torch.randint(0, 0x48, (rows, columns), dtype=torch.uint8, device=device) | signs
    scales = tiled(_around(0.02, rows, 1, device), 1)
    return PackedLinear(pack_words(codes, Kind.FP8), scales, Kind.FP8, columns, columns, rows)


def _around(size: float, rows: int, groups: int, device: str) -> Tensor:
    return size * (0.7 + 0.6 * torch.rand(rows, groups, device=device))


def _integers(low: int, high: int, rows: int, columns: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randint(low, high, (rows, columns), dtype=dtype, device=device)
