"""The kernels of a mixture of experts against the eager reference: values, edges, and the same bits among other rows.

Without a GPU they run through Triton's interpreter: the same code, slowly.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from paceline.layers.gemm_tiling import TILE_ROWS, Tiling
from paceline.layers.linear import UnquantizedLinear
from paceline.layers.moe import (
    ClampedSwiGlu,
    Matrices,
    MixtureOfExperts,
    Router,
    StackedWeights,
    route,
    stacked_experts,
)
from paceline.layers.moe_tiling import ExpertTiling, expert_tiling
from paceline.layers.moe_triton import ExpertKernels, ExpertTiles, RealRows, grouped
from paceline.layers.mxfp4_experts import Mxfp4Matrices
from tests.layers.test_moe import CLAMPED, EXPERTS, HIDDEN, by_definition, mixture_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KERNELS = ExpertKernels(use_pdl=False)
NARROW = ExpertTiling(Tiling(16, 32, 2, 4), Tiling(32, 16, 2, 4))
TALL = ExpertTiling(Tiling(16, 32, 2, 4, 32), Tiling(32, 16, 2, 4, 32))
pytestmark = pytest.mark.slow


def mxfp4_mixture(*, biases: bool, dtype: torch.dtype, size: int = 32, hidden: int = 96) -> MixtureOfExperts:
    """Random codes, exponents near those of real experts, and in float32 the smallest there is."""

    def random(rows: int, columns: int) -> Mxfp4Matrices:
        codes = torch.randint(0, 256, (EXPERTS, rows, columns // 2), dtype=torch.uint8)
        exponents = torch.randint(118, 128, (EXPERTS, rows, columns // 32), dtype=torch.uint8)
        exponents[0, 0, 0] = 0 if dtype == torch.float32 else 118
        return Mxfp4Matrices(codes.to(DEVICE), exponents.to(DEVICE), dtype)

    def bias(columns: int) -> Tensor | None:
        return torch.randn(EXPERTS, columns).to(DEVICE, dtype) if biases else None

    weights = StackedWeights(random(2 * size, hidden), random(hidden, size), bias(2 * size), bias(hidden))
    router = Router(UnquantizedLinear(torch.randn(EXPERTS, hidden).to(DEVICE, dtype)), 2)
    return MixtureOfExperts(router, stacked_experts(weights, CLAMPED if biases else None))


def unpacked_mixture(mixture: MixtureOfExperts) -> MixtureOfExperts:
    """The same with weights in floating point."""
    stacked = mixture.experts.stacked
    assert stacked is not None

    def matrices(packed: Matrices) -> Tensor:
        assert isinstance(packed, Mxfp4Matrices)
        return torch.stack([linear.dequantize(packed.dtype) for linear in packed.linears()])

    weights = replace(stacked, gate_up=matrices(stacked.gate_up), down=matrices(stacked.down))
    return MixtureOfExperts(mixture.router, stacked_experts(weights, mixture.experts.activation))


@pytest.mark.parametrize(("rows", "biases"), [(1, False), (5, True), (21, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter has no bfloat16
def test_experts_in_mxfp4_give_the_bits_of_unpacked_ones(rows: int, biases: bool, dtype: torch.dtype) -> None:
    mixture = mxfp4_mixture(biases=biases, dtype=dtype)
    assert mixture.can_fuse
    x = torch.randn(rows, 96).to(DEVICE, dtype)
    logits = mixture.router.logits(x)
    kernels = ExpertKernels(use_pdl=False, tiling=ExpertTiling(Tiling(16, 64, 2, 4), Tiling(32, 32, 2, 4)))
    assert torch.equal(kernels(x, logits, mixture), kernels(x, logits, unpacked_mixture(mixture)))
    eager = mixture.experts(x, route(logits, mixture.router))
    assert torch.equal(eager, unpacked_mixture(mixture).experts(x, route(logits, mixture.router)))
    assert (kernels(x, logits, mixture).float() - eager.float()).norm() / eager.float().norm() < 0.01


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 6, 16, 40, 300])
def test_experts_in_mxfp4_agree_with_unpacked_ones_on_a_gpu(rows: int) -> None:
    """To the bit where both go through the same instructions; tiles of many rows read unpacked weights by others."""
    mixture = mxfp4_mixture(biases=True, dtype=torch.bfloat16, size=192, hidden=256)
    x = torch.randn(rows, 256).to(DEVICE, torch.bfloat16)
    logits = mixture.router.logits(x)
    packed, unpacked = KERNELS(x, logits, mixture), KERNELS(x, logits, unpacked_mixture(mixture))
    if rows <= 16:
        assert torch.equal(packed, unpacked)
    assert (packed.float() - unpacked.float()).norm() / unpacked.float().norm() < 0.005


def logits_choosing(choices: list[list[int]]) -> Tensor:
    """Logits whose best experts are these, in this order."""
    logits = torch.randn(len(choices), EXPERTS) * 0.1
    for row, experts in enumerate(choices):
        for place, expert in enumerate(experts):
            logits[row, expert] = 5.0 - place * 0.5
    return logits.to(DEVICE)


@pytest.mark.parametrize(
    ("rows", "top_k", "renormalize", "activation", "biases"),
    [(1, 2, True, None, False), (5, 3, False, None, False), (16, 2, True, CLAMPED, True), (21, 2, True, None, True)],
)
def test_the_kernels_agree_with_the_definition(
    rows: int, top_k: int, renormalize: bool, activation: ClampedSwiGlu | None, biases: bool
) -> None:
    mixture = mixture_of(top_k, renormalize=renormalize, activation=activation, biases=biases, device=DEVICE)
    x, residual = (torch.randn(rows, HIDDEN, device=DEVICE) for _ in range(2))
    logits = mixture.router.logits(x)
    ours = KERNELS(x, logits, mixture, residual)
    expected = residual + by_definition(mixture, x, logits)
    assert (ours.double() - expected).norm() / expected.norm() < 1e-5
    without = KERNELS(x, logits, mixture)
    torch.testing.assert_close(without + residual, ours, rtol=1e-4, atol=1e-4)


EDGES = {
    "all rows on the same experts": [[3, 5]] * 16,
    "no two rows on one expert": [[0, 1], [2, 3], [4, 5]],
    "one expert of all rows and another each": [[6, row % 6] for row in range(16)],
    "the last expert alone": [[6, 0]],
    "more rows of an expert than a tile has": [[2, 4]] * 20,
}


@pytest.mark.parametrize("choices", EDGES.values(), ids=EDGES)
@pytest.mark.parametrize("tiling", [NARROW, TALL], ids=["narrow", "tall"])
def test_every_routing_is_computed_right(choices: list[list[int]], tiling: ExpertTiling) -> None:
    mixture, logits = mixture_of(2, device=DEVICE), logits_choosing(choices)
    x = torch.randn(len(choices), HIDDEN, device=DEVICE)
    ours = ExpertKernels(use_pdl=False, tiling=tiling)(x, logits, mixture)
    expected = by_definition(mixture, x, logits)
    assert (ours.double() - expected).norm() / expected.norm() < 1e-5


def test_equal_logits_choose_as_many_different_experts() -> None:
    router = Router(UnquantizedLinear(torch.zeros(EXPERTS, HIDDEN)), 3)
    tiles = KERNELS.route(torch.zeros(4, EXPERTS, device=DEVICE), router, TILE_ROWS)
    assert tiles.expert.tolist() == [0, 1, 2, -1, -1, -1, -1]
    torch.testing.assert_close(tiles.weights.cpu(), torch.full((4, 3), 1 / 3))


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    mixture = mixture_of(3, device=DEVICE)
    x = torch.randn(6, HIDDEN, device=DEVICE)
    logits = mixture.router.logits(x)
    kernels = ExpertKernels(use_pdl=False, tiling=NARROW)
    together = kernels(x, logits, mixture, x)
    for row in range(6):
        alone = slice(row, row + 1)
        assert torch.equal(together[alone], kernels(x[alone], logits[alone], mixture, x[alone]))
    order = torch.tensor([5, 2, 0, 1, 3, 4])
    assert torch.equal(together[order], kernels(x[order], logits[order], mixture, x[order]))


@pytest.mark.parametrize("nodes", [3, 12])  # of two sequences: one program, and more rows than a tile
def test_padding_chooses_no_expert_and_stays_as_it_was(nodes: int) -> None:
    mixture = mixture_of(2, device=DEVICE)
    counts = torch.tensor([2, 0, nodes], device=DEVICE)
    rows = 3 * nodes
    x = torch.randn(rows, HIDDEN, device=DEVICE)
    logits = mixture.router.logits(x)
    real = torch.arange(rows, device=DEVICE) % nodes < counts.repeat_interleave(nodes)
    logits[~real] = float("nan")  # rows without a sequence hold garbage
    residual = torch.randn(rows, HIDDEN, device=DEVICE)
    padded = RealRows(counts, nodes)
    kernels = ExpertKernels(use_pdl=False, tiling=NARROW)
    ours = kernels(x, logits, mixture, residual, padded)
    expected = residual + by_definition(mixture, x, logits.nan_to_num())
    torch.testing.assert_close(ours[real].double(), expected[real], rtol=1e-4, atol=1e-4)
    assert torch.equal(ours[~real], residual[~real])
    tiles = kernels.route(logits, mixture.router, TILE_ROWS, padded)
    chosen = set(route(logits[real], mixture.router).experts.flatten().tolist())
    assert set(tiles.expert.tolist()) - {-1} == chosen, "no expert is read for padding alone"
    places = tiles.pairs[tiles.expert >= 0]
    assert (places >= 0).sum() == 2 * real.sum()


def pairs_of(tiles: ExpertTiles) -> dict[int, list[int]]:
    """Pairs by expert."""
    by_expert: dict[int, list[int]] = {}
    for expert, pairs in zip(tiles.expert.tolist(), tiles.pairs.tolist()):
        if expert >= 0:
            by_expert.setdefault(expert, []).extend(pair for pair in pairs if pair >= 0)
    return by_expert


@pytest.mark.parametrize("rows", [1, 7, 16])
def test_one_launch_groups_as_torch_does(rows: int) -> None:
    router = Router(UnquantizedLinear(torch.zeros(EXPERTS, HIDDEN)), 3)
    logits = torch.randn(rows, EXPERTS, device=DEVICE)
    tiles = KERNELS.route(logits, router, TILE_ROWS)
    routing = route(logits, router)
    torch.testing.assert_close(tiles.weights, routing.weights)
    again = grouped(routing.experts.flatten().int(), routing.weights, EXPERTS, TILE_ROWS)
    assert pairs_of(tiles) == pairs_of(again)
    used = tiles.expert[tiles.expert >= 0].tolist()
    assert used == sorted(set(used)) and tiles.expert.shape[0] == min(3 * rows, EXPERTS)


@pytest.mark.parametrize(("rows", "tile_rows"), [(40, 16), (40, 4), (3, 16), (300, 64)])
def test_tiles_hold_every_pair_once_and_no_more_rows_than_they_have(rows: int, tile_rows: int) -> None:
    experts = torch.stack([torch.randperm(EXPERTS)[:3] for _ in range(rows)]).int()
    experts[rows // 2] = EXPERTS  # padding
    tiles = grouped(experts.flatten(), torch.ones(rows, 3), EXPERTS, tile_rows)
    by_expert = pairs_of(tiles)
    for expert in range(EXPERTS):
        assert by_expert.get(expert, []) == (experts.flatten() == expert).nonzero().flatten().tolist()
    assert tiles.expert.shape[0] <= EXPERTS + 3 * rows // tile_rows


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_has_the_same_bits_at_every_number_of_rows_on_a_gpu(dtype: torch.dtype) -> None:
    mixture = wide_mixture(dtype)
    x = torch.randn(300, 256, dtype=dtype, device="cuda")
    logits = mixture.router.logits(x)
    alone = torch.cat([KERNELS(x[row : row + 1], logits[row : row + 1], mixture) for row in range(64)])
    for rows in (2, 6, 16, 17, 33, 64, 300):
        assert torch.equal(KERNELS(x[:rows], logits[:rows], mixture)[:64], alone[:rows]), rows
    reference = mixture.experts(x, route(logits, mixture.router)).float()
    ours = KERNELS(x, logits, mixture).float()
    assert (ours - reference).norm() / reference.norm() < 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 6, 16, 40])
def test_one_graph_serves_every_routing(rows: int) -> None:
    mixture, kernels = wide_mixture(torch.bfloat16), ExpertKernels(use_pdl=True)
    x = torch.randn(rows, 256, dtype=torch.bfloat16, device="cuda")
    logits = torch.randn(rows, 32, dtype=torch.bfloat16, device="cuda")
    kernels(x, logits, mixture, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels(x, logits, mixture, x)
    for _ in range(5):
        x.normal_()
        logits.normal_()
        graph.replay()
        assert torch.equal(out, KERNELS(x, logits, mixture, x))


def wide_mixture(dtype: torch.dtype) -> MixtureOfExperts:
    def random(*shape: int) -> Tensor:
        return (torch.randn(shape) * 0.1).to("cuda", dtype)

    experts = stacked_experts(StackedWeights(random(32, 2 * 192, 256), random(32, 256, 192)))
    assert expert_tiling(300 * 4, 32, dtype).rows > TILE_ROWS
    return MixtureOfExperts(Router(UnquantizedLinear(random(32, 256)), 4), experts)
