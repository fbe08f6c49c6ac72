"""One stopwatch and one counter for every way to write a text.

The stopwatch starts before the prompt is read and stops after the last token. Counts are core.tally's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from paceline.bench.subject import Setting, Subject
from paceline.core.budget import Budget
from paceline.core.costs import Timing
from paceline.core.distribution import SamplingParams
from paceline.core.protocols import Round
from paceline.core.sequence import Sequence
from paceline.core.stopping import StopRules
from paceline.core.tally import Tally
from paceline.core.tree import depths
from paceline.decode.generate import run


@dataclass(frozen=True, slots=True)
class Mark:
    """One round of one text: where in the answer it began, what was offered, how deep it went and what stood."""

    position: int
    offered: int
    reach: int
    accepted: int


@dataclass(slots=True)
class Watch:
    """A budget that decides nothing of its own: it asks another one and writes down what it sees.

    Rounds are timed in decode/step.py and told to the budget, so this is where all figures of a round can be had
    without a second clock.
    """

    inner: Budget
    timings: list[Timing] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    def plan(self, texts: list[Sequence]) -> list[int]:
        return self.inner.plan(texts)

    def observe(self, texts: list[Sequence], rounds: list[Round], timing: Timing) -> None:
        self.inner.observe(texts, rounds, timing)
        self.timings.append(timing)
        for text, done in zip(texts, rounds):
            began = text.new_tokens - len(done.emitted)
            reach = max(depths(done.tree.parents[: done.tree.guesses]), default=-1) + 1
            self.marks.append(Mark(began, done.tree.guesses, reach, done.accepted))

    def forget(self, text: Sequence) -> None:
        self.inner.forget(text)


@dataclass(frozen=True, slots=True)
class Written:
    """Texts written together: their tokens, and what it took. tally.seconds is the stopwatch's.

    drafts_unseen: the device drafts while the host goes on, so that the wait for it falls into the pass that follows
    """

    answers: list[list[int]]
    tally: Tally
    timings: list[Timing]
    marks: list[Mark]
    drafts_unseen: bool = False

    @property
    def draft_seconds(self) -> float:
        return sum(timing.draft_seconds for timing in self.timings)

    @property
    def verify_seconds(self) -> float:
        return sum(timing.verify_seconds for timing in self.timings)

    @property
    def other_seconds(self) -> float:
        """Reading the prompt, and what is done between rounds."""
        return max(0.0, self.tally.seconds - self.draft_seconds - self.verify_seconds)


def added(runs: list[Written]) -> Tally:
    """What several runs counted, their seconds too."""
    total = Tally()
    for written in runs:
        total.add(written.tally)
    return total


@dataclass(frozen=True, slots=True)
class Length:
    """How long answers may get. `ignore_end`: exactly this long, whatever the model says."""

    max_new_tokens: int = 64
    ignore_end: bool = False


def write(
    subject: Subject, setting: Setting, prompts: list[list[int]], length: Length, *, budget: Budget, seed: int = 0
) -> Written:
    """Write the answers to `prompts` together, under the stopwatch."""
    texts = [_text(subject, setting, ids, length, seed + number) for number, ids in enumerate(prompts)]
    watch = Watch(budget)
    machinery = subject.machinery(setting, watch)
    started = time.perf_counter()
    for _ in run(texts, machinery, largest_batch=len(texts)):
        pass
    seconds = time.perf_counter() - started
    total = Tally()
    for text in texts:
        total.add(text.tally)
    total.seconds = seconds
    unseen = subject.target.card.device != "cpu"
    return Written([text.written for text in texts], total, watch.timings, watch.marks, unseen)


def _text(subject: Subject, setting: Setting, ids: list[int], length: Length, seed: int) -> Sequence:
    sampling = SamplingParams(temperature=setting.temperature, seed=seed)
    card = subject.target.card
    ends: frozenset[int] = frozenset() if length.ignore_end else card.end_tokens
    room = max(1, min(length.max_new_tokens, card.longest_text - len(ids)))
    return Sequence(ids, sampling, StopRules(room, ends))
