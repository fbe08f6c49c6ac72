"""One stopwatch and one counter for every way to write a text.

The stopwatch starts before the prompt is read and stops after the last token. Counts are core.tally's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from paceline.bench.candidates import Setting, Subject
from paceline.core.cost_model import StepTiming
from paceline.core.draft_length import DraftLengthPolicy
from paceline.core.draft_tree import depths
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.core.stats import SpecStats
from paceline.core.stopping import StopRules
from paceline.core.types import StepResult
from paceline.engines.local.generate import run


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

    inner: DraftLengthPolicy
    timings: list[StepTiming] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    def plan(self, texts: list[Sequence]) -> list[int]:
        return self.inner.plan(texts)

    def observe(self, texts: list[Sequence], rounds: list[StepResult], timing: StepTiming) -> None:
        self.inner.observe(texts, rounds, timing)
        self.timings.append(timing)
        for text, result in zip(texts, rounds):
            began = text.new_tokens - len(result.emitted)
            reach = max(depths(result.tree.parents[: result.tree.num_draft_tokens]), default=-1) + 1
            self.marks.append(Mark(began, result.tree.num_draft_tokens, reach, result.accepted))

    def forget(self, text: Sequence) -> None:
        self.inner.forget(text)


@dataclass(frozen=True, slots=True)
class Written:
    """Texts written together: their tokens, and what it took. tally.seconds is the stopwatch's.

    drafts_unseen: the device drafts while the host goes on, so that the wait for it falls into the pass that follows
    """

    answers: list[list[int]]
    stats: SpecStats
    timings: list[StepTiming]
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
        return max(0.0, self.stats.seconds - self.draft_seconds - self.verify_seconds)


def added(runs: list[Written]) -> SpecStats:
    """What several runs counted, their seconds too."""
    total = SpecStats()
    for written in runs:
        total.add(written.stats)
    return total


@dataclass(frozen=True, slots=True)
class Length:
    """How long answers may get. `ignore_eos`: exactly this long, whatever the model says."""

    max_new_tokens: int = 64
    ignore_eos: bool = False


def write(
    subject: Subject, setting: Setting, prompts: list[list[int]], length: Length, *, budget: DraftLengthPolicy, seed: int = 0
) -> Written:
    """Write the answers to `prompts` together, under the stopwatch."""
    texts = [_text(subject, setting, ids, length, seed + number) for number, ids in enumerate(prompts)]
    watch = Watch(budget)
    parts = subject.parts(setting, watch)
    started = time.perf_counter()
    for _ in run(texts, parts, max_num_seqs=len(texts)):
        pass
    seconds = time.perf_counter() - started
    total = SpecStats()
    for text in texts:
        total.add(text.stats)
    total.seconds = seconds
    unseen = subject.target.info.device != "cpu"
    return Written([text.written for text in texts], total, watch.timings, watch.marks, unseen)


def _text(subject: Subject, setting: Setting, ids: list[int], length: Length, seed: int) -> Sequence:
    sampling = SamplingParams(temperature=setting.temperature, seed=seed)
    info = subject.target.info
    ends: frozenset[int] = frozenset() if length.ignore_eos else info.eos_token_ids
    room = max(1, min(length.max_new_tokens, info.max_seq_len - len(ids)))
    return Sequence(ids, sampling, StopRules(room, ends))
