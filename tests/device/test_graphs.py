"""The cache of graphs on any machine. Captures need a GPU and are tested where they are used."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from paceline.device import graphs
from paceline.device.graphs import (
    EagerPool,
    GraphCache,
    GraphPool,
    captures_in_a_row,
    garbage_collection_paused,
    needed,
    num_one_off_works,
    rounded_up,
)


class Cycle:
    """Holds itself, so that only the collector can free it."""

    def __init__(self) -> None:
        self.own = self


@pytest.mark.slow
def test_no_garbage_is_collected_for_a_capture_nor_during_it() -> None:
    """Captures may come in the middle of a sequence, and collecting takes longer than they do."""
    before = weakref.ref(Cycle())
    with garbage_collection_paused():
        assert before() is not None
        during = weakref.ref(Cycle())
        for _ in range(5000):  # enough for the collector to start by itself
            Cycle()
        assert during() is not None
    assert gc.isenabled()
    gc.collect()
    assert during() is None


@pytest.mark.slow
def test_captures_in_a_row_look_for_garbage_once() -> None:
    before = weakref.ref(Cycle())
    with captures_in_a_row("cuda"):
        assert before() is None
        between = weakref.ref(Cycle())
        with garbage_collection_paused():
            assert between() is not None
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.collect()
    assert between() is None


def test_nothing_is_paused_where_there_are_no_graphs() -> None:
    with captures_in_a_row("cpu"):
        assert gc.isenabled()


@pytest.mark.slow
def test_a_collector_that_was_off_stays_off_and_errors_pass() -> None:
    gc.disable()
    try:
        with pytest.raises(ValueError), garbage_collection_paused():
            raise ValueError
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_sizes_are_rounded_up() -> None:
    assert [rounded_up(value, (1, 4, 8)) for value in (1, 2, 8, 9)] == [1, 4, 8, None]
    assert [needed((1, 4, 8), largest) for largest in (1, 2, 4, 5, 99)] == [[1], [1, 4], [1, 4], [1, 4, 8], [1, 4, 8]]


def test_work_reads_the_buffers_of_its_key_and_is_made_once() -> None:
    calls: list[str] = []
    cache: GraphCache[str, list[int], int] = GraphCache(EagerPool(), 2)

    def buffers() -> list[int]:
        calls.append("made")
        return [0]

    graph = cache.get("a", buffers, lambda numbers: numbers[0] + 1)
    graph.buffers[0] = 41
    assert graph.run() == 42
    assert cache.get("a", buffers, lambda numbers: 0) is graph and calls == ["made"]


def test_beyond_the_limit_the_oldest_graph_goes() -> None:
    cache: GraphCache[str, None, None] = GraphCache(EagerPool(), 2)
    for key in "abc":
        cache.get(key, lambda: None, lambda buffers: None)
    assert len(cache) == 2 and "a" not in cache and "b" in cache and "c" in cache
    cache.clear()
    assert len(cache) == 0


def test_the_cheapest_near_graph_runs_a_key_of_another_size() -> None:
    cache: GraphCache[int, None, int] = GraphCache(
        EagerPool(), 9, near=lambda captured, key: key <= captured <= 2 * key, cost=lambda key: key
    )
    for size in (16, 4, 6):
        cache.get(size, lambda: None, lambda buffers, size=size: size)
    near = cache.nearest(3)
    assert near is not None and near.run() == 4
    assert cache.nearest(7) is None and cache.nearest(17) is None


class RecordedGraph:
    """What a pool sees of a graph."""

    def __init__(self, work: object, label: str, pool_handle: int) -> None:
        self.captured, self.pool_handle = label != "fails", pool_handle


@pytest.mark.parametrize(("label", "handles"), [("works", [0, 0, 0]), ("fails", [0, 1, 2])])
def test_a_pool_lives_as_long_as_it_is_used(monkeypatch: pytest.MonkeyPatch, label: str, handles: list[int]) -> None:
    """Its newest graph stays even if the cache drops it; a graph that failed may have left the pool unusable."""
    numbers = iter(range(9))
    monkeypatch.setattr(graphs, "CudaGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(numbers))
    pool, used = GraphPool(label, torch.device("cuda")), []
    for _ in range(3):
        graph = weakref.ref(pool.capture(lambda: None))
        assert graph() is not None
        used.append(graph().pool_handle)
    assert used == handles


def test_captures_are_counted_and_eager_work_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "CudaGraph", RecordedGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    before = num_one_off_works()
    EagerPool().capture(lambda: None)
    assert num_one_off_works() == before
    cache: GraphCache[str, None, None] = GraphCache(GraphPool("works", torch.device("cuda")), 2)
    for _ in range(2):
        cache.get("a", lambda: None, lambda buffers: None)
    assert num_one_off_works() == before + 1
