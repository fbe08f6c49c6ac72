"""Rounds until every text is done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.core.protocols import Round
from paceline.core.sequence import Sequence
from paceline.decode.step import Machinery, prefill, stride


@dataclass(frozen=True, slots=True)
class Progress:
    """One text has grown by one round."""

    text: Sequence
    round: Round


def run(
    texts: list[Sequence], with_: Machinery, *, largest_batch: int = 8, keep_slots: bool = False
) -> Iterator[Progress]:
    """Write all texts to their end, at most `largest_batch` at a time; a finished text makes room for the next.

    Yields after every round, for every text in it. Leaving the iterator early gives everything back. `keep_slots`: the
    caller goes on using the finished texts' slots, and closes them.
    """
    waiting = list(reversed(texts))
    running: list[Sequence] = []
    clocks = {text.number: 0.0 for text in texts}
    try:
        while waiting or running:
            fresh = [waiting.pop() for _ in range(min(len(waiting), largest_batch - len(running)))]
            for text in fresh:
                clocks[text.number] = time.perf_counter()
            running += fresh
            prefill(fresh, with_)
            for text, done in zip(running, stride(running, with_)):
                text.tally.seconds = time.perf_counter() - clocks[text.number]
                yield Progress(text, done)
            for text in [text for text in running if text.finished]:
                running.remove(text)
                release(text, with_, keep_slot=keep_slots)
    finally:
        for text in running:
            release(text, with_, keep_slot=keep_slots)


def release(text: Sequence, with_: Machinery, *, keep_slot: bool = False) -> None:
    """Forget a text everywhere. `keep_slot`: its cache goes on living, for a next turn."""
    text.stays = keep_slot
    with_.drafter.end(text)
    with_.budget.forget(text)
    if text.slot is not None and not keep_slot:
        with_.target.close(text.slot)
        text.slot = None
