"""Captured passes: a function of fixed tensors, recorded once as a CUDA graph and replayed.

Capture is lazy. Where it fails the function goes on being called as it is, and one warning says so.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Generic, TypeVar

import torch

Made = TypeVar("Made")
Key = TypeVar("Key")
# Numbers of sequences that work is captured for; a batch of another number is padded to the next.
NUM_SEQS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# Graphs of one pool share their scratch memory, so a result must be read before the next graph of that pool runs.
# Whoever hands results on to another graph (a draft to its target) has a pool of its own.
Pool = Any  # torch's handle of a memory pool


def new_pool() -> Pool:
    return torch.cuda.graph_pool_handle()


def rounded_up(value: int, steps: tuple[int, ...]) -> int | None:
    """The next captured size, or None where there is none."""
    return next((step for step in steps if step >= value), None)


def keep_newest(kept: dict[Key, Made], key: Key, made: Made, most: int) -> None:
    """Keep what was made under its key; beyond `most` the oldest goes."""
    if len(kept) >= most:
        kept.pop(next(iter(kept)))
    kept[key] = made


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Old graphs that lie in a cycle of references may not be thrown away while a new one is being captured: that ends
    the capture, and leaves its pool unusable."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@cache
def _first_run_stream(device: int) -> torch.cuda.Stream:
    """Where work runs before it is captured. The same for all: the allocator keeps what is freed for its stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Captured(Generic[Made]):
    """Calls `work` by replaying it. Its inputs and outputs are tensors that stay where they are."""

    def __init__(self, work: Callable[[], Made], label: str, pool: Pool) -> None:
        self._work = work
        self._graph: torch.cuda.CUDAGraph | None = None
        self._made: Made
        stream = _first_run_stream(torch.cuda.current_device())
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles kernels and fills the libraries' workspaces
            self._made = work()
        torch.cuda.current_stream().wait_stream(stream)
        try:
            graph = torch.cuda.CUDAGraph()
            with nothing_collected(), torch.cuda.graph(graph, pool=pool):
                self._made = work()
            self._graph = graph
        except RuntimeError as error:
            warnings.warn(f"{label} could not be captured and runs launch by launch: {error}", stacklevel=2)

    @property
    def worked(self) -> bool:
        return self._graph is not None

    def __call__(self) -> Made:
        if self._graph is None:
            self._made = self._work()
        else:
            self._graph.replay()
        return self._made


class Capture:
    """Captures work in a pool of its own: for graphs whose results are read before the next one of them runs."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._pool: Pool = None
        # A pool cannot be used again once its last graph is gone, and whoever has us capture may forget all at once.
        self._newest: Captured[Any] | None = None

    def __call__(self, work: Callable[[], Made]) -> Callable[[], Made]:
        if self._newest is None or not self._newest.worked:
            self._pool = new_pool()
        made = Captured(work, self._label, self._pool)
        self._newest = made
        return made
