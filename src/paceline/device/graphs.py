"""CUDA graphs: work on fixed tensors, captured once for each size and replayed.

`GraphCache` is the one cache of graphs: decode and prefill passes, verification and EAGLE chains use it. A key maps to
fixed buffers and the work that reads them. Work is captured on first use. Where capture fails, or the device has no
graphs, the work runs eagerly: the same results, launch by launch. Captures are counted, so that the time they take is
not mistaken for the cost of a step.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Generic, TypeVar

import torch

from paceline.device.garbage import garbage_collection_paused
from paceline.device.properties import supports_graphs

Key = TypeVar("Key")
Buffers = TypeVar("Buffers")
Output = TypeVar("Output")
NUM_SEQS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # batch sizes with graphs; other batches are padded to the next


class _OneOffWork:
    """Counts work of this process that only the first call pays."""

    def __init__(self) -> None:
        self.count = 0


_ONE_OFF = _OneOffWork()


def note_one_off_work() -> None:
    """Something was compiled, captured or allocated: what the step under way takes is not what such a step costs."""
    _ONE_OFF.count += 1


def num_one_off_works() -> int:
    """How often this process has done such work. A step between two equal numbers was a clean measurement."""
    return _ONE_OFF.count


def rounded_up(value: int, sizes: tuple[int, ...]) -> int | None:
    """The smallest of these sizes that holds the value; None where none does."""
    return next((size for size in sizes if size >= value), None)


def needed(sizes: tuple[int, ...], largest: int) -> list[int]:
    """Those of these sizes that values up to `largest` are rounded up to."""
    return [size for size, smaller in zip(sizes, (0, *sizes)) if smaller < largest]


def captures_in_a_row(device: torch.device | str) -> AbstractContextManager[None]:
    """Around work in which many graphs may be captured, on a device that has graphs."""
    return _captures_in_a_row() if supports_graphs(torch.device(device)) else nullcontext()


@contextmanager
def _captures_in_a_row() -> Iterator[None]:
    gc.collect()
    with garbage_collection_paused():
        yield
    torch.cuda.empty_cache()  # what the work took before its capture lies with another stream than sequences use


@cache
def _warmup_stream(device: int) -> torch.cuda.Stream:
    """The stream work runs on before its capture. One for all: the allocator keeps freed memory for its stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _capture(graph: torch.cuda.CUDAGraph, pool_handle: Any, stream: torch.cuda.Stream) -> Iterator[None]:
    """What is queued in the block becomes the graph. As `torch.cuda.graph`, which also gives back all free memory of
    the process first: where many graphs are captured, each would allocate it again.

    Destroying an old graph meanwhile ends the capture and leaves its memory pool unusable, so no garbage is collected.
    To collect before would take longer than the capture, in the middle of somebody's sequence.
    """
    torch.cuda.synchronize()
    with garbage_collection_paused(), torch.cuda.stream(stream):
        graph.capture_begin(pool=pool_handle)
        try:
            yield
        finally:
            graph.capture_end()


class CudaGraph(Generic[Output]):
    """Repeats `work` by replaying it. Its inputs and outputs are tensors that keep their addresses."""

    def __init__(self, work: Callable[[], Output], label: str, pool_handle: Any) -> None:
        self._work = work
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Output
        stream = _warmup_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles kernels and fills the libraries' workspaces
            self._output = work()
        torch.cuda.current_stream().wait_stream(stream)
        try:
            graph = torch.cuda.CUDAGraph()
            with _capture(graph, pool_handle, stream):
                self._output = work()
            self._graph = graph
        except RuntimeError as error:
            warnings.warn(f"{label} could not be captured as a CUDA graph and runs eagerly: {error}", stacklevel=2)

    @property
    def captured(self) -> bool:
        return self._graph is not None

    def __call__(self) -> Output:
        if self._graph is None:
            self._output = self._work()
        else:
            self._graph.replay()
        return self._output


class GraphPool:
    """Memory that graphs share. Read the output of a graph before the next graph of the same pool runs.

    A user whose outputs feed another graph (a draft model and its target) has a pool of its own.
    """

    def __init__(self, label: str, device: torch.device) -> None:
        self._label, self._eager = label, not supports_graphs(device)
        self._handle: Any = None
        # A pool is unusable once its last graph is gone, and a cache may drop all of its graphs at once.
        self._newest: CudaGraph[Any] | None = None

    def capture(self, work: Callable[[], Output]) -> Callable[[], Output]:
        """A call that repeats `work`: a CUDA graph, or the work itself on a device without graphs."""
        if self._eager:
            return work
        note_one_off_work()
        if self._newest is None or not self._newest.captured:
            self._handle = torch.cuda.graph_pool_handle()
        graph = CudaGraph(work, self._label, self._handle)
        self._newest = graph
        return graph


class EagerPool(GraphPool):
    """Captures nothing: work runs launch by launch on every device."""

    def __init__(self) -> None:
        super().__init__("", torch.device("cpu"))


class Graph(Generic[Key, Buffers, Output]):
    """One captured piece of work: what it was captured for, the buffers it reads, and the call that runs it."""

    def __init__(self, key: Key, buffers: Buffers, run: Callable[[], Output]) -> None:
        self.key, self.buffers, self.run = key, buffers, run


class GraphCache(Generic[Key, Buffers, Output]):
    """Key -> graph. At most `max_graphs` are kept; the oldest goes first.

    near  whether the graph of a captured key (first argument) may also run a wanted key (second argument)
    cost  orders the keys that may: the cheapest runs
    """

    def __init__(
        self,
        pool: GraphPool,
        max_graphs: int,
        *,
        near: Callable[[Key, Key], bool] = lambda captured, key: captured == key,
        cost: Callable[[Key], Any] = lambda key: 0,
    ) -> None:
        self._pool, self._max_graphs = pool, max_graphs
        self._near, self._cost = near, cost
        self._graphs: dict[Key, Graph[Key, Buffers, Output]] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Key) -> bool:
        return key in self._graphs

    def nearest(self, key: Key) -> Graph[Key, Buffers, Output] | None:
        """The cheapest graph that can run this key; None where there is none."""
        usable = [captured for captured in self._graphs if self._near(captured, key)]
        return self._graphs[min(usable, key=self._cost)] if usable else None

    def get(
        self, key: Key, make_buffers: Callable[[], Buffers], work: Callable[[Buffers], Output]
    ) -> Graph[Key, Buffers, Output]:
        """The graph of exactly this key; captured now if there is none."""
        graph = self._graphs.get(key)
        if graph is None:
            buffers = make_buffers()
            graph = Graph(key, buffers, self._pool.capture(lambda: work(buffers)))
            if len(self._graphs) >= self._max_graphs:
                self._graphs.pop(next(iter(self._graphs)))
            self._graphs[key] = graph
        return graph

    def clear(self) -> None:
        """Drop every graph: the memory that they read has moved."""
        self._graphs.clear()
