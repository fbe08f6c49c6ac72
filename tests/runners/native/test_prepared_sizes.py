"""What is captured at load covers what sequences and batches meet."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from paceline.core.types import WarmupPlan
from paceline.device.graphs import NUM_SEQS
from paceline.runners.native import NativeRunner
from paceline.runners.native.decode_graphs import DecodeGraphs
from paceline.runners.native.prepared_sizes import DraftSize, ForwardSize, draft_sizes, forward_sizes
from tests.runners.native.fused import TorchGraphs
from tests.runners.native.models import tiny

FIXED, AUTO = WarmupPlan((1, 8), (7,), 2048, quick_batches=(2, 4, 8)), WarmupPlan(
    tuple(range(1, 17)), tuple(range(1, 8)), 2048, quick_batches=(2, 4, 8)
)


def many_kernels(rows: int) -> bool:
    return False


def one_kernel(rows: int) -> bool:
    return rows <= 32


@pytest.fixture(scope="module")
def graphs() -> DecodeGraphs:
    return TorchGraphs(NativeRunner.of_model(tiny("llama", max_position_embeddings=4096), "tiny", kv_cache_tokens=8192))


def is_covered(graphs: DecodeGraphs, captured: list[ForwardSize], wanted: ForwardSize) -> bool:
    own, *others = (
        graphs.fits(size.num_seqs, size.width, size.tokens, trees=size.trees) for size in (wanted, *captured)
    )
    assert own is not None
    return any(other is not None and graphs._runs(other, own, graphs.ops) for other in others)


@pytest.mark.parametrize("trees", [False, True])
def test_every_part_of_a_small_batch_runs_on_a_prepared_graph(graphs: DecodeGraphs, trees: bool) -> None:
    """Of eight sequences with seven draft tokens: some have ended, others have room for few."""
    plan = WarmupPlan(FIXED.widths, FIXED.num_draft_tokens, 2048, quick_batches=(2, 4, 8), trees=trees)
    captured = [*forward_sizes(plan, 64, many_kernels), ForwardSize(8, 1, 1024)]  # plain steps are rehearsed
    for count in (2, 3, 4, 6, 8):
        for width in range(2, 9):
            assert is_covered(graphs, captured, ForwardSize(count, width, 600, trees)), (count, width)


def test_one_sequence_has_graphs_of_every_context_and_of_trees_where_there_are_any() -> None:
    sizes = forward_sizes(FIXED, 64, many_kernels)
    assert {size.tokens for size in sizes if size.num_seqs == 1} == {512, 1024, 2048}
    assert not any(size.trees for size in sizes)
    trees = forward_sizes(WarmupPlan((1, 8), (7,), 2048, trees=True), 64, many_kernels)
    assert {size.tokens for size in trees if size.trees} == {512, 1024, 2048}
    assert {size.width for size in trees if size.trees} == {8}, "a second node needs a width of three"


def test_batches_of_one_kernel_are_prepared_for_one_context_alone() -> None:
    sizes = forward_sizes(AUTO, 64, one_kernel)
    batches = [size for size in sizes if size.num_seqs > 1]
    assert {size.tokens for size in batches} == {2048}
    assert all(one_kernel(size.num_seqs * size.width) for size in batches)


def test_without_draft_tokens_or_batches_nothing_else_is_prepared() -> None:
    plain = forward_sizes(WarmupPlan((1,), (), 2048, quick_batches=(2, 4, 8)), 64, many_kernels)
    alone = forward_sizes(WarmupPlan((1, 8), (7,), 2048), 64, many_kernels)
    assert {(size.num_seqs, size.width) for size in plain} == {(1, 1)}
    assert {(size.num_seqs, size.width) for size in alone} == {(1, 1), (1, 8)}
    assert max(NUM_SEQS) >= 8


def test_chains_of_a_draft_model_are_prepared_for_every_number_of_draft_tokens() -> None:
    assert draft_sizes(FIXED, many_kernels) == [DraftSize(1, 7, tokens) for tokens in (2048, 1024, 512)]
    batches = [size for size in draft_sizes(AUTO, one_kernel) if size.num_seqs > 1]
    assert {size.num_seqs for size in batches} == {2, 4, 8} and {size.num_tokens for size in batches} == {2, 4, 8}
