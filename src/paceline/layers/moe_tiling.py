"""How the products of experts are cut into tiles. benchmarks/moe_kernel.py --sweep compares the choices."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paceline.layers.gemm_tiling import TILE_ROWS, Tiling

WIDE_ROWS = 64  # of a tile in a prompt: weights take the long side of the product


@dataclass(frozen=True, slots=True)
class ExpertTiling:
    """The tiles of both products; they share their rows."""

    gate_up: Tiling
    down: Tiling

    @property
    def rows(self) -> int:
        return self.gate_up.rows


# One row chooses few experts, so narrow tiles give every multiprocessor work. Rows of `down` are short: wider tiles
# there, or a program would end before its loads are under way. Columns do not change a sum, nor do stages.
FEW_EXPERTS = ExpertTiling(Tiling(16, 128, 5, 2), Tiling(32, 128, 4, 4))
MANY_EXPERTS = ExpertTiling(Tiling(32, 128, 4, 4), Tiling(64, 128, 3, 4))
PROMPT = ExpertTiling(Tiling(64, 64, 3, 4, WIDE_ROWS), Tiling(64, 64, 4, 4, WIDE_ROWS))
FEW_PAIRS = 24  # more pairs choose enough experts


def expert_tiling(pairs: int, num_experts: int, dtype: torch.dtype) -> ExpertTiling:
    """By the pairs of a pass. Four bytes a number do not fit the shared memory in wide tiles."""
    if pairs >= num_experts * TILE_ROWS and dtype.itemsize == 2:
        return PROMPT
    return FEW_EXPERTS if pairs <= FEW_PAIRS else MANY_EXPERTS
