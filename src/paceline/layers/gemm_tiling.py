"""How project_kernel cuts a product into tiles: measured on an H200 (docs/log.md)."""

from __future__ import annotations

from dataclasses import dataclass

TILE_ROWS = 16  # of x in a tile
WIDE_TILES = (32, 64)  # the same where the tile is transposed: weights take the long side of the product


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tile of one product."""

    columns: int
    step: int
    stages: int
    warps: int
    rows: int = TILE_ROWS

    @property
    def transposed(self) -> bool:
        return self.rows > TILE_ROWS


def tiling(columns: int, in_features: int, gate: bool, rows: int = TILE_ROWS) -> Tiling:
    """Many bytes in flight for long rows of weights, many programs for short ones. rows: of a tile."""
    if rows > TILE_ROWS:
        return _wide_tiling(columns, in_features, gate, rows)
    if in_features < 2048:
        return Tiling(16, 128, 4, 2)
    if gate or columns >= 16384:
        return Tiling(64, 64, 4, 4) if gate else Tiling(64, 128, 4, 4)
    return Tiling(32, 128, 6, 4)


def _wide_tiling(columns: int, in_features: int, gate: bool, rows: int) -> Tiling:
    """Every program reads all of x, so more columns a program mean less to read, but too few programs read slowly."""
    if in_features < 2048:
        return Tiling(32, 64, 4, 4, rows)
    if gate:
        return Tiling(64, 64, 4, 4, rows)
    return Tiling(64, 128, 3, 4, rows) if columns * rows >= 64 * 6144 else Tiling(32, 128, 4, 4, rows)
