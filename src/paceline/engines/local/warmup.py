"""A short measurement of what a pass costs by its width, for a draft-length policy to start from; or only a first run
of such passes, so that the first sequence does not wait for libraries and graphs."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from statistics import median

import torch

from paceline.core.cost_model import CostCurve, CostModel, draft_curve
from paceline.core.protocols import Preparation, Runner
from paceline.core.types import ModelInfo, Row, SequenceCache
from paceline.device.argmax import argmax_rows
from paceline.device.graphs import captures_in_a_row
from paceline.errors import OutOfMemory

WIDTHS = (1, 2, 3, 4, 6, 8, 9, 16, 24)
# Where passes are graphs: kernels have no known grain, so steps in the cost may be anywhere. Nothing wider is sent of
# one sequence, and a graph would be captured for it. What a batch costs follows from the last two, so they lie apart.
GRAPH_WIDTHS = (*range(1, 13), 16)
CPU_GRAIN = 8  # rows that many CPU kernels take at a time: the ninth is a step up, the tenth is not
FLAT = 0.85  # of a pass over 16 tokens that one over 9 takes at least, where kernels take eight at a time
CONTEXT = 48  # tokens in the sequence cache while measuring, where the model reads so many
REPEATS = 2
CATCH_UP_SIZES = (64, 512)  # tokens that a draft model reads at once, to measure how quick it is
QUICK_SECONDS = 0.2
ANNOUNCE_SECONDS = 2.0
FIRST_TOKEN, GOLDEN_RATIO = 7, 0.618034  # steps of this share of the vocabulary come back to no token for long
LONGEST_SECONDS = 4.0  # a large model on a small machine is measured with fewer repeats, never for minutes


def measure_pass(
    target: Runner,
    widths: tuple[int, ...] = WIDTHS,
    repeats: int = REPEATS,
    *,
    num_seqs: int = 1,
    longest_seconds: float = LONGEST_SECONDS,
) -> CostCurve:
    """Seconds of a pass of the target over `num_seqs` sequences, by all tokens in it. Interleaved, medians; leaves
    nothing.

    The first turn warms up. At least one turn is measured; no further one begins after `longest_seconds`.
    """
    widths, context = fitting_widths(target.info, widths), context_length(target.info, widths)
    samples: dict[int, list[float]] = {width: [] for width in widths}
    seq_caches: list[SequenceCache] = []
    tokens = [different_tokens(target.info, context + max(widths), seq) for seq in range(num_seqs)]
    began = time.perf_counter()
    try:
        for _ in range(num_seqs):
            seq_caches.append(target.new_cache())
        rows = [Row.chain(seq_cache, row[:context]) for seq_cache, row in zip(seq_caches, tokens)]
        target.forward(rows, last_only=True)
        for turn in range(repeats + 1):
            if turn > 1 and time.perf_counter() - began > longest_seconds:
                break
            for width in widths:
                taken = _one_pass(target, seq_caches, context, [row[context : context + width] for row in tokens])
                if turn:
                    samples[width].append(taken)
    finally:
        for seq_cache in seq_caches:
            target.free(seq_cache)
    return CostCurve({width * num_seqs: median(taken) for width, taken in samples.items()})


def warm_up(target: Runner, widths: tuple[int, ...]) -> None:
    """Read a prompt and make a pass of each width, once. Leaves nothing; a cache too small for it is not an error."""
    seq_cache, context = target.new_cache(), _warm_up_context(target.info, widths)
    fitting = sorted(set(fitting_widths(target.info, widths)))
    tokens = different_tokens(target.info, context + fitting[-1])
    try:
        target.forward([Row.chain(seq_cache, tokens[:context])], last_only=True)
        for width in fitting:
            _one_pass(target, [seq_cache], context, [tokens[context : context + width]])
    except OutOfMemory:
        pass
    finally:
        target.free(seq_cache)


def _warm_up_context(info: ModelInfo, widths: tuple[int, ...]) -> int:
    """Tokens of the prompt. On a CPU nothing is compiled or captured by length: the shortest pass wakes the threads and
    loads the libraries, and a longer one would only delay the first token."""
    return 1 if info.device == "cpu" else context_length(info, widths)


def fitting_widths(info: ModelInfo, widths: tuple[int, ...]) -> tuple[int, ...]:
    """Those widths that fit the context of the model behind at least one token."""
    return tuple(width for width in widths if width < info.max_seq_len) or (1,)


def context_length(info: ModelInfo, widths: tuple[int, ...]) -> int:
    """Tokens to read before passes of these widths, so that the widest still fits the context of the model."""
    return max(1, min(CONTEXT, info.max_seq_len - max(fitting_widths(info, widths))))


def different_tokens(info: ModelInfo, count: int, seq: int = 0) -> list[int]:
    """Tokens of sequence number `seq`, from all over the vocabulary.

    Equal tokens choose equal experts: a mixture of experts would seem to cost the same at every width.
    """
    step = max(1, round(info.vocab_size * GOLDEN_RATIO))
    return [(FIRST_TOKEN + seq + place * step) % info.vocab_size for place in range(count)]


def _one_pass(target: Runner, seq_caches: list[SequenceCache], context: int, tokens: list[list[int]]) -> float:
    for seq_cache in seq_caches:
        target.truncate(seq_cache, context)
    started = time.perf_counter()
    output = target.forward([Row.chain(seq_cache, row) for seq_cache, row in zip(seq_caches, tokens)])
    argmax_rows(output.logits).tolist()  # as a step does: choose, and wait for the device
    return time.perf_counter() - started


def measure_costs(target: Runner, draft: Runner | None = None, verify: CostCurve | None = None) -> CostModel:
    """Costs of the target (`verify`, where they were measured before), and of a draft model: one pass a draft token.

    What other drafters cost is measured while they run; until then they count as free.
    """
    widths = WIDTHS if target.info.device == "cpu" else GRAPH_WIDTHS
    curve = measure_pass(target, widths) if verify is None else verify.copy()
    costs = CostModel(curve, grain=pass_grain(target.info, curve))
    if draft is not None:
        seconds = measure_pass(draft, widths=(1,)).at(1)
        costs.draft = draft_curve({1: seconds, 8: 8 * seconds})
        costs.catch_up = measure_catch_up(draft)
    return costs


def measure_catch_up(draft: Runner) -> float:
    """Seconds that a draft model needs for each token of a sequence that it has not read, in one go.

    The longer chunk is only read where the shorter one is quick: loading must not wait for it.
    """
    sizes = [size for size in CATCH_UP_SIZES if size < draft.info.max_seq_len] or [1]
    seconds = _seconds_to_read(draft, sizes[0])
    for size in sizes[1:]:
        if seconds * size > QUICK_SECONDS:
            break
        seconds = _seconds_to_read(draft, size)
    return seconds


def _seconds_to_read(runner: Runner, size: int) -> float:
    """For each token, the second time."""
    row, taken = different_tokens(runner.info, size), 0.0
    for _ in range(2):
        seq_cache, started = runner.new_cache(), time.perf_counter()
        try:
            runner.forward([Row.chain(seq_cache, row)], last_only=True).logits.argmax().item()
        except OutOfMemory:
            return taken / size
        finally:
            runner.free(seq_cache)
        taken = time.perf_counter() - started
    return taken / size


class LoadTimes:
    """What loading takes, part by part."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._parts: dict[str, float] = {}

    def took(self, part: str) -> None:
        """All time since the part before."""
        self._parts[part] = time.perf_counter() - self._began - sum(self._parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self._parts.items())
        return f"{sum(self._parts.values()):.1f} s: {parts}"


def run_preparations(preparations: list[Preparation], label: str, device: str) -> None:
    """Run them all. After two seconds a line says how many are left, and about how long they take.

    Without memory for one of them the rest is left for later: sequences come first.
    """
    started = announced = time.perf_counter()
    with suppress(OutOfMemory, torch.OutOfMemoryError), captures_in_a_row(device):
        for index, prepare in enumerate(preparations):
            now = time.perf_counter()
            if now - announced > ANNOUNCE_SECONDS and index:
                left = (now - started) / index * (len(preparations) - index)
                print(f"paceline: {label}: {index} of {len(preparations)}, about {left:.0f} s left", file=sys.stderr)
                announced = now
            prepare()


def pass_grain(info: ModelInfo, curve: CostCurve) -> int:
    """Tokens that a pass takes at a time, by what it was measured to take: some kernels of a CPU take eight rows at a
    time, others each row by itself. Captured passes on a GPU are padded too, but there width is nearly free."""
    is_grained = info.device == "cpu" and curve.at(CPU_GRAIN + 1) >= FLAT * curve.at(2 * CPU_GRAIN)
    return CPU_GRAIN if is_grained else 1


def synchronize(device: str) -> None:
    """Wait until the device has done all its work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
