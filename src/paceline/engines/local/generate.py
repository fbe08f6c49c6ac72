"""Steps until every sequence is done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.core.sequence import Sequence
from paceline.core.types import StepResult
from paceline.engines.local.step import EngineParts, prefill, stride


@dataclass(frozen=True, slots=True)
class Progress:
    """One sequence has grown by one step."""

    seq: Sequence
    round: StepResult


def run(
    seqs: list[Sequence], parts: EngineParts, *, max_num_seqs: int = 8, keep_caches: bool = False
) -> Iterator[Progress]:
    """Write all sequences to their end, at most `max_num_seqs` at a time; a finished sequence makes room for the next.

    Yields after every step, for every sequence in it. Leaving the iterator early gives everything back. `keep_caches`: the
    caller goes on using the finished sequences' sequence caches, and closes them.
    """
    waiting = list(reversed(seqs))
    running: list[Sequence] = []
    clocks = {seq.seq_id: 0.0 for seq in seqs}
    try:
        while waiting or running:
            fresh = [waiting.pop() for _ in range(min(len(waiting), max_num_seqs - len(running)))]
            for seq in fresh:
                clocks[seq.seq_id] = time.perf_counter()
            running += fresh
            prefill(fresh, parts)
            for seq, result in zip(running, stride(running, parts)):
                seq.stats.seconds = time.perf_counter() - clocks[seq.seq_id]
                yield Progress(seq, result)
            for seq in [seq for seq in running if seq.finished]:
                running.remove(seq)
                release(seq, parts, keep_cache=keep_caches)
    finally:
        for seq in running:
            release(seq, parts, keep_cache=keep_caches)


def release(seq: Sequence, parts: EngineParts, *, keep_cache: bool = False) -> None:
    """Forget a sequence everywhere. `keep_cache`: its cache goes on living, for a next turn."""
    seq.keep_cache = keep_cache
    parts.drafter.end(seq)
    parts.budget.forget(seq)
    if seq.seq_cache is not None and not keep_cache:
        parts.target.free(seq.seq_cache)
        seq.seq_cache = None
