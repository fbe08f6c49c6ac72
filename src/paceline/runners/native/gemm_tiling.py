"""How project_kernel cuts a product: found by measuring on an H200 (docs/log.md)."""

from __future__ import annotations

from dataclasses import dataclass

TILE_ROWS = 16  # of x in a tile
TALL_TILES = (32, 64)  # the same where weights take the long side of the product


@dataclass(frozen=True, slots=True)
class Tiling:
    """How project_kernel cuts a product."""

    columns: int
    step: int
    stages: int
    warps: int
    rows: int = TILE_ROWS

    @property
    def tall(self) -> bool:
        return self.rows > TILE_ROWS


def tiling(columns: int, inner: int, gate: bool, rows: int = TILE_ROWS) -> Tiling:
    """Many bytes in flight for long rows, many programs for short ones. rows: of a tile."""
    if rows > TILE_ROWS:
        return _tall_tiling(columns, inner, gate, rows)
    if inner < 2048:
        return Tiling(16, 128, 4, 2)
    if gate or columns >= 16384:
        return Tiling(64, 64, 4, 4) if gate else Tiling(64, 128, 4, 4)
    return Tiling(32, 128, 6, 4)


def _tall_tiling(columns: int, inner: int, gate: bool, rows: int) -> Tiling:
    """Every program reads all of x, so more columns a program mean less to read, but too few programs read slowly."""
    if inner < 2048:
        return Tiling(32, 64, 4, 4, rows)
    if gate:
        return Tiling(64, 64, 4, 4, rows)
    return Tiling(64, 128, 3, 4, rows) if columns * rows >= 64 * 6144 else Tiling(32, 128, 4, 4, rows)
