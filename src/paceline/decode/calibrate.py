"""A short measurement of what a pass costs by its width, so that a budget can start from facts."""

from __future__ import annotations

import time
from statistics import median

import torch

from paceline.core.budget import CostCurve, Costs
from paceline.core.protocols import Row, Runner

WIDTHS = (1, 2, 3, 5, 9)
CONTEXT = 48  # tokens in the slot while measuring
REPEATS = 3


def measure_pass(target: Runner, widths: tuple[int, ...] = WIDTHS, repeats: int = REPEATS) -> CostCurve:
    """Seconds of a pass of the target by width. Interleaved, medians; leaves nothing behind."""
    slot = target.open()
    samples: dict[int, list[float]] = {width: [] for width in widths}
    token = min(7, target.card.vocab_size - 1)
    try:
        target.forward([Row.chain(slot, [token] * CONTEXT)], last_only=True)
        for turn in range(repeats + 1):
            for width in widths:
                target.trim(slot, CONTEXT)
                started = time.perf_counter()
                said = target.forward([Row.chain(slot, [token] * width)])
                int(said.logits[-1].argmax())  # wait for the device
                if turn:  # the first turn warms up
                    samples[width].append(time.perf_counter() - started)
    finally:
        target.close(slot)
    return CostCurve({width: median(taken) for width, taken in samples.items()})


def measure_costs(target: Runner, draft: Runner | None = None) -> Costs:
    """Costs of the target, and of a draft model that makes one pass a guess."""
    costs = Costs(verify=measure_pass(target))
    if draft is not None:
        one = measure_pass(draft, widths=(1,)).at(1)
        costs.draft = CostCurve({k: one * k for k in (1, 4, 8)})
    else:
        costs.draft = CostCurve({1: 1e-4, 8: 2e-4})  # looking something up; measured for real as rounds go by
    return costs


def synchronize(device: str) -> None:
    """Wait until the device has done all it was asked."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
