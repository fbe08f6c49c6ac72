"""What steps take: one by one, with the pause before each, or several in a row as the device takes them."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from paceline.core.cost_model import StepTiming
from paceline.core.sequence import Sequence
from paceline.device.graphs import num_one_off_works

Steps = TypeVar("Steps")


@dataclass(slots=True)
class TimedLoop(Generic[Steps]):
    """Steps in a row, and what they take.

    groups         what is read at a time of every sequence
    last_read      when the last of them was read; at first, when the loop was begun
    one_off_works  how many there were before it
    """

    groups: Generator[list[Steps], bool | None, None]
    last_read: float
    one_off_works: int
    is_first: bool = True

    def next(self, *, last: bool = False) -> list[Steps] | None:
        """What comes next, None at the end. last: no further step is begun."""
        try:
            return self.groups.send(True if last and not self.is_first else None)
        except StopIteration:
            return None

    def timing(self, ks: list[int], num_steps: int = 1) -> StepTiming:
        """Of a step of the group that was just read, which has so many. The first also waits for all before it, so it
        is not what a step costs."""
        now = time.perf_counter()
        seconds, self.last_read = (now - self.last_read) / num_steps, now
        clean, self.is_first = not self.is_first and num_one_off_works() == self.one_off_works, False
        num_drafting = sum(k > 0 for k in ks)
        nodes = sum(ks) + len(ks)
        return StepTiming(0.0, seconds, nodes, max(ks), len(ks), num_drafting, clean=clean, looped=True)


@dataclass(frozen=True, slots=True)
class StepBegun:
    """A step that has begun: when, after what pause, and how many one-off works there were before it."""

    at: float
    pause: float
    one_off_works: int

    @property
    def is_clean(self) -> bool:
        return num_one_off_works() == self.one_off_works


@dataclass(slots=True)
class Pauses:
    """What lies between two steps: outputs are handed out, and the next step is scheduled.

    Several steps in a row share one pause, single ones have one each: it is part of what they cost.
    """

    usual: float = 0.0
    ended: float | None = None  # when the last step was measured; None: other work came after it
    seqs: list[Sequence] = field(default_factory=list)  # of that step

    def begin(self, seqs: list[Sequence]) -> StepBegun:
        """A step of these sequences begins."""
        now = time.perf_counter()
        if self.ended is not None and self.seqs == seqs:
            pause = now - self.ended
            self.usual = min(pause, 2 * self.usual) if self.usual else pause  # a single long one was a hiccup
        return StepBegun(now, self.usual, num_one_off_works())

    def end(self, seqs: list[Sequence]) -> None:
        self.ended, self.seqs = time.perf_counter(), seqs

    def interrupt(self) -> None:
        self.ended, self.seqs = None, []
