"""Times of single passes and drafts, and memory, for the rig."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from paceline.core.types import DraftInput, Row

CONTEXT = 300  # tokens in the cache while passes are timed


def median_ms(work: Callable[[], Any], device: str, repeats: int = 20) -> float:
    """Median milliseconds of some work, by the device's own clock where it has one."""
    times = [_event_ms(work) if device.startswith("cuda") else _wall_ms(work) for _ in range(repeats)]
    return statistics.median(times)


def _event_ms(work: Callable[[], Any]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end))


def _wall_ms(work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - started)


def pass_times(target: Any, widths: tuple[int, ...]) -> dict[int, float]:
    """Milliseconds of the graph of a pass over one sequence, by width. target: a native runner on a GPU."""
    seq_cache, times = target.new_cache(), {}
    target.forward([Row.chain(seq_cache, list(range(100, 100 + CONTEXT)))], last_only=True)
    for width in widths:
        target.truncate(seq_cache, CONTEXT)
        target.forward([Row.chain(seq_cache, [5] * width)])
        graph = target.decode_graphs.forward_graph(target.decode_graphs.fits(1, width, CONTEXT + width))
        times[width] = median_ms(graph.run, target.info.device)
    target.free(seq_cache)
    return times


def draft_times(draft: Any, ks: tuple[int, ...], temperature: float = 0.0) -> dict[int, float]:
    """Milliseconds of the graph of a whole draft, by its length. draft: a native runner on a GPU."""
    seq_cache, times = draft.new_cache(), {}
    for k in ks:
        uniforms = [0.5] * k if temperature else None
        draft.draft([DraftInput(seq_cache, list(range(100, 100 + CONTEXT)), temperature, uniforms)], k)
        graph = draft.decode_graphs.draft_graph(draft.decode_graphs.fits(1, 2, CONTEXT + k), k, temperature > 0)
        times[k] = median_ms(graph.run, draft.info.device)
    draft.free(seq_cache)
    return times


def prefill_ms(work: Callable[[], Any], device: str) -> float:
    work()
    return median_ms(work, device, 3)


def allocated(device: str) -> int:
    """Bytes of tensors on the GPU; 0 on a CPU."""
    return torch.cuda.memory_allocated() if device.startswith("cuda") else 0
