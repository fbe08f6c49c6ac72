"""Launches of the kernels of a mixture of experts; the eager reference is in layers/moe.py.

Nothing here asks the device for a number, and every shape follows from the rows and the experts a row has: a graph can
hold it, and serves every routing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from paceline.layers.gemm_tiling import TILE_ROWS
from paceline.layers.moe import Matrices, MixtureOfExperts, Router, StackedWeights
from paceline.layers.moe_kernels import (
    expert_down_kernel,
    expert_gate_up_kernel,
    route_kernel,
    weighted_sum_kernel,
)
from paceline.layers.moe_tiling import ExpertTiling, expert_tiling
from paceline.layers.mxfp4_experts import Mxfp4Matrices

ROUTE_WARPS = 4
SUM_COLUMNS = 512  # of one program


@dataclass(frozen=True, slots=True, eq=False)
class RealRows:
    """Which rows of a padded pass are real: of the `nodes` rows of a sequence the first `counts`."""

    counts: Tensor  # int64 [sequences]
    nodes: int


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTiles:
    """Pairs of a row and one of its experts, by expert."""

    expert: Tensor  # int32 [tiles]; -1: the tile is empty
    pairs: Tensor  # int32 [tiles, rows of a tile]; -1: none
    weights: Tensor  # float32 [rows, top_k], by pair; 0 for a row that is padding


@dataclass(frozen=True, slots=True)
class ExpertKernels:
    """How the kernels are launched. use_pdl: they start before the one ahead has ended."""

    use_pdl: bool
    tiling: ExpertTiling | None = None  # None: by the number of rows

    def __call__(
        self,
        x: Tensor,
        logits: Tensor,
        mixture: MixtureOfExperts,
        residual: Tensor | None = None,
        real: RealRows | None = None,
    ) -> Tensor:
        """residual + the weighted sum of each row's experts, by the router's logits. x is normed already."""
        stacked = mixture.experts.stacked
        assert stacked is not None, "the caller asks can_fuse first"
        tiling = self.tiling or expert_tiling(x.shape[0] * mixture.router.top_k, stacked.gate_up.shape[0], x.dtype)
        launch = self if x.shape[0] <= TILE_ROWS else replace(self, use_pdl=False)  # two wide tiles would share a place
        tiles = launch.route(logits, mixture.router, tiling.rows, real)
        return launch.products(x, tiles, mixture, stacked, tiling, residual)

    def route(self, logits: Tensor, router: Router, tile_rows: int, real: RealRows | None = None) -> ExpertTiles:
        """The experts of each row, grouped: in one launch for the rows of a tile."""
        (rows, num_experts), device = logits.shape, logits.device
        pairs, one_program = rows * router.top_k, rows <= TILE_ROWS == tile_rows
        num_tiles = min(pairs, num_experts) if one_program else 0
        experts = torch.empty(pairs, dtype=torch.int32, device=device)
        weights = torch.empty(rows, router.top_k, dtype=torch.float32, device=device)
        tile_expert = torch.empty(num_tiles, dtype=torch.int32, device=device)
        tile_pairs = torch.empty(num_tiles, tile_rows, dtype=torch.int32, device=device)
        route_kernel[(triton.cdiv(rows, TILE_ROWS),)](
            logits.contiguous(), experts if real is None else real.counts, experts, weights, tile_expert, tile_pairs,
            rows, num_experts, num_tiles, router.scale,
            RENORMALIZE=router.renormalize, PADDED=real is not None, NODES=1 if real is None else real.nodes,
            TOP_K=router.top_k, ROWS=TILE_ROWS, EXPERTS=triton.next_power_of_2(num_experts),
            TILES=triton.next_power_of_2(num_tiles) if one_program else 0, num_warps=ROUTE_WARPS, **self._launch(),
        )
        if one_program:
            return ExpertTiles(tile_expert, tile_pairs, weights)
        return grouped(experts, weights, num_experts, tile_rows)

    def products(
        self,
        x: Tensor,
        tiles: ExpertTiles,
        mixture: MixtureOfExperts,
        stacked: StackedWeights,
        tiling: ExpertTiling,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Both products of every tile, and their weighted sum."""
        activated = self.gate_up(x, tiles, mixture, stacked, tiling)
        return self.weighted_sum(x, self.down(activated, tiles, stacked, tiling), tiles, residual)

    def gate_up(
        self, x: Tensor, tiles: ExpertTiles, mixture: MixtureOfExperts, stacked: StackedWeights, tiling: ExpertTiling
    ) -> Tensor:
        """The first product of every pair, with its activation. [pairs, size]"""
        columns, in_features = stacked.down.shape[2], x.shape[1]
        out = x.new_empty(tiles.weights.numel(), columns)
        bias, clamped, tile = stacked.gate_up_bias, mixture.experts.activation, tiling.gate_up
        weight, exponents = _stored(stacked.gate_up)
        expert_gate_up_kernel[(triton.cdiv(columns, tile.columns), tiles.expert.shape[0])](
            x, weight, exponents, x if bias is None else bias, tiles.expert, tiles.pairs, out, columns, in_features,
            0.0 if clamped is None else clamped.alpha, 0.0 if clamped is None else clamped.limit,
            BIAS=bias is not None, CLAMPED=clamped is not None, MXFP4=weight is not exponents,
            EVEN=in_features % tile.step == 0, TRANSPOSED=tile.transposed, TOP_K=mixture.router.top_k,
            ROWS=tile.rows, COLUMNS=tile.columns, STEP=tile.step,
            num_warps=tile.warps, num_stages=tile.stages, **self._launch(),
        )
        return out

    def down(self, activated: Tensor, tiles: ExpertTiles, stacked: StackedWeights, tiling: ExpertTiling) -> Tensor:
        """The second product of every pair. float32 [pairs, hidden_size]"""
        columns, in_features = stacked.down.shape[1:]
        out = torch.empty(activated.shape[0], columns, dtype=torch.float32, device=activated.device)
        bias, tile = stacked.down_bias, tiling.down
        weight, exponents = _stored(stacked.down)
        expert_down_kernel[(triton.cdiv(columns, tile.columns), tiles.expert.shape[0])](
            activated, weight, exponents, activated if bias is None else bias, tiles.expert, tiles.pairs, out,
            columns, in_features, BIAS=bias is not None, MXFP4=weight is not exponents,
            EVEN=in_features % tile.step == 0, TRANSPOSED=tile.transposed,
            ROWS=tile.rows, COLUMNS=tile.columns, STEP=tile.step,
            num_warps=tile.warps, num_stages=tile.stages, **self._launch(),
        )
        return out

    def weighted_sum(self, x: Tensor, parts: Tensor, tiles: ExpertTiles, residual: Tensor | None) -> Tensor:
        """residual + the pairs of each row, by their weights. [rows, hidden_size]"""
        rows, columns = x.shape
        out = torch.empty_like(x)
        weighted_sum_kernel[(rows, triton.cdiv(columns, SUM_COLUMNS))](
            parts, tiles.weights, x if residual is None else residual, out, columns, RESIDUAL=residual is not None,
            TOP_K=tiles.weights.shape[1], COLUMNS=SUM_COLUMNS, num_warps=4, **self._launch(),
        )
        return out

    def _launch(self) -> dict[str, Any]:
        return {"USE_PDL": True, "launch_pdl": True} if self.use_pdl else {"USE_PDL": False}


def _stored(matrices: Matrices) -> tuple[Tensor, Tensor]:
    """Weights and their exponents as the kernels take them; twice the weights where there are no exponents."""
    return (matrices.codes, matrices.exponents) if isinstance(matrices, Mxfp4Matrices) else (matrices, matrices)


def grouped(experts: Tensor, weights: Tensor, num_experts: int, tile_rows: int) -> ExpertTiles:
    """Tiles of any number of pairs, by torch. experts: of each pair; `num_experts` for none. For wide passes."""
    pairs, device = experts.shape[0], experts.device
    order = experts.argsort(stable=True)
    starts = torch.searchsorted(experts[order], torch.arange(num_experts + 1, dtype=torch.int32, device=device))
    tile_counts = (starts.diff() + tile_rows - 1) // tile_rows
    tile_ends = tile_counts.cumsum(0)
    tile = torch.arange(min(pairs, num_experts + pairs // tile_rows), device=device)
    expert = torch.searchsorted(tile_ends, tile, right=True)
    used = expert < num_experts
    expert = expert.clamp_max(num_experts - 1)
    first = starts[expert] + (tile - tile_ends[expert] + tile_counts[expert]) * tile_rows
    place = first[:, None] + torch.arange(tile_rows, device=device)
    inside = (place < starts[expert + 1][:, None]) & used[:, None]
    tile_pairs = torch.where(inside, order[place.clamp_max(pairs - 1)], -1)
    return ExpertTiles(torch.where(used, expert, -1).int(), tile_pairs.int(), weights)
