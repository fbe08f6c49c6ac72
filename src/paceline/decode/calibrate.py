"""A short measurement of what a pass costs by its width, so that a budget can start from facts; or only a first run of
such passes, so that the first text does not wait while libraries and graphs are made ready."""

from __future__ import annotations

import time
from statistics import median

import torch

from paceline.core.costs import CostCurve, Costs, draft_curve
from paceline.core.protocols import ModelCard, Row, Runner, Slot
from paceline.errors import OutOfMemory

WIDTHS = (1, 2, 4, 8, 16, 24)
CPU_GRAIN = 8  # rows that CPU kernels take at a time: the ninth is a step up, the tenth is not
CONTEXT = 48  # tokens in the slot while measuring
REPEATS = 2
LONGEST_SECONDS = 4.0  # a large model on a small machine is measured with fewer repeats, never for minutes


def measure_pass(
    target: Runner,
    widths: tuple[int, ...] = WIDTHS,
    repeats: int = REPEATS,
    *,
    texts: int = 1,
    longest_seconds: float = LONGEST_SECONDS,
) -> CostCurve:
    """Seconds of a pass of the target over `texts` texts, by all tokens in it. Interleaved, medians; leaves nothing.

    The first turn warms up. At least one turn is measured; no further one begins after `longest_seconds`.
    """
    samples: dict[int, list[float]] = {width: [] for width in widths}
    slots: list[Slot] = []
    token = min(7, target.card.vocab_size - 1)
    began = time.perf_counter()
    try:
        for _ in range(texts):
            slots.append(target.open())
        target.forward([Row.chain(slot, [token] * CONTEXT) for slot in slots], last_only=True)
        for turn in range(repeats + 1):
            if turn > 1 and time.perf_counter() - began > longest_seconds:
                break
            for width in widths:
                taken = _one_pass(target, slots, [token] * width)
                if turn:
                    samples[width].append(taken)
    finally:
        for slot in slots:
            target.close(slot)
    return CostCurve({width * texts: median(taken) for width, taken in samples.items()})


def warm_up(target: Runner, widths: tuple[int, ...]) -> None:
    """Read a prompt and make a pass of each width, once. Leaves nothing; a cache too small for it is left alone."""
    slot, token = target.open(), min(7, target.card.vocab_size - 1)
    try:
        target.forward([Row.chain(slot, [token] * CONTEXT)], last_only=True)
        for width in sorted(set(widths)):
            _one_pass(target, [slot], [token] * width)
    except OutOfMemory:
        pass
    finally:
        target.close(slot)


def _one_pass(target: Runner, slots: list[Slot], tokens: list[int]) -> float:
    for slot in slots:
        target.trim(slot, CONTEXT)
    started = time.perf_counter()
    said = target.forward([Row.chain(slot, tokens) for slot in slots])
    said.logits.argmax(dim=-1).tolist()  # as a round does: choose, and wait for the device
    return time.perf_counter() - started


def measure_costs(target: Runner, draft: Runner | None = None, verify: CostCurve | None = None) -> Costs:
    """Costs of the target (`verify`, where they are known already), and of a draft model that makes one pass a guess.

    What other drafters cost is measured as rounds go by; until then they are taken to be free.
    """
    costs = Costs(measure_pass(target) if verify is None else verify.copy(), grain=grain_of(target.card))
    if draft is not None:
        one = measure_pass(draft, widths=(1,)).at(1)
        costs.draft = draft_curve({1: one, 8: 8 * one})
    return costs


def grain_of(card: ModelCard) -> int:
    """Tokens that a pass takes at a time. Captured passes on a GPU are padded too, but there width is nearly free."""
    return CPU_GRAIN if card.device == "cpu" else 1


def synchronize(device: str) -> None:
    """Wait until the device has done all it was asked."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
