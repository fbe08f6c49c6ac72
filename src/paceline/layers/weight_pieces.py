"""A weight as a kernel that runs whole passes reads it: pieces, joined by rows, each in one format."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor


class PieceFormat(IntEnum):
    """As runners/native/persistent_pass.cu numbers them."""

    PLAIN = 0
    INT4 = 1  # one scale for a multiple of 128 columns, or for all
    Q4_K = 2
    Q6_K = 3
    FP8 = 4  # as INT4


@dataclass(frozen=True, slots=True, eq=False)
class WeightPiece:
    """Some rows of a weight, as quantization/packed_layout.py lays them out.

    shared: a scale is that of 2^shared steps of 128 columns.
    """

    format: PieceFormat
    rows: int
    columns: int
    codes: Tensor
    high: Tensor | None = None
    scales: Tensor | None = None
    minimums: Tensor | None = None
    outer_scales: Tensor | None = None
    outer_minimums: Tensor | None = None
    shared: int = 0

    def fields(self) -> list[int]:
        """In the order in which the kernel names them."""
        beside = (self.high, self.scales, self.minimums, self.outer_scales, self.outer_minimums)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in beside]
        return [int(self.format), self.rows, self.codes.data_ptr(), *addresses, self.shared]


Pieces = tuple[WeightPiece, ...]
NUM_FIELDS = 9  # of a piece
WHOLE_ROW = 31  # `shared` of scales that whole rows have
