"""One stopwatch and one counter for every way to decode.

The stopwatch starts before the prompt is read and stops after the last token. Counts are those of core.stats.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from paceline.core.cost_model import StepTiming
from paceline.core.draft_length import DraftLengthPolicy
from paceline.core.draft_tree import DraftTree, depths
from paceline.core.draft_value import DraftValue
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.core.stats import EngineStats, SpecStats
from paceline.core.types import Request, StepResult
from paceline.engines.local.engine import LocalEngine


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of one sequence: the output position it began at, its draft tokens, their depth, the accepted ones."""

    position: int
    num_draft_tokens: int
    depth: int
    accepted: int


@dataclass(slots=True)
class StepLog:
    """A draft-length policy that passes everything on to another one and records every step.

    The engine times its steps for the policy, so this is where the figures of a step are known without a second clock.
    """

    policy: DraftLengthPolicy
    timings: list[StepTiming] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)

    def plan(self, seqs: list[Sequence]) -> list[int]:
        return self.policy.plan(seqs)

    def draft_value(self) -> DraftValue | None:
        return self.policy.draft_value()

    def cut(self, seqs: list[Sequence], trees: list[DraftTree]) -> list[DraftTree]:
        return self.policy.cut(seqs, trees)

    def observe(self, seqs: list[Sequence], results: list[StepResult], timing: StepTiming) -> None:
        self.policy.observe(seqs, results, timing)
        self.timings.append(timing)
        for seq, result in zip(seqs, results):
            position = seq.num_new_tokens - len(result.emitted)
            depth = max(depths(result.tree.parents[: result.tree.num_draft_tokens]), default=-1) + 1
            self.steps.append(StepRecord(position, result.tree.num_draft_tokens, depth, result.accepted))

    @property
    def is_probing(self) -> bool:
        return self.policy.is_probing

    def sent(self, seqs: list[Sequence], trees: list[DraftTree]) -> None:
        self.policy.sent(seqs, trees)

    def stays_plain(self, seqs: list[Sequence]) -> bool:
        return self.policy.stays_plain(seqs)

    def forget(self, seq: Sequence) -> None:
        self.policy.forget(seq)

    def rehearsed(self, timings: list[StepTiming]) -> None:
        self.policy.rehearsed(timings)

    def clear(self) -> None:
        self.timings, self.steps = [], []


@dataclass(frozen=True, slots=True)
class BatchRun:
    """Sequences generated together: their output tokens, and what it took. stats.seconds is the stopwatch's.

    drafts_unseen  the device drafts while the host goes on, so that the wait for it falls into the pass that follows
    """

    outputs: list[list[int]]
    stats: SpecStats
    timings: list[StepTiming]
    steps: list[StepRecord]
    drafts_unseen: bool = False

    @property
    def draft_seconds(self) -> float:
        return sum(timing.draft_seconds for timing in self.timings)

    @property
    def verify_seconds(self) -> float:
        return sum(timing.verify_seconds for timing in self.timings)

    @property
    def other_seconds(self) -> float:
        """Prefill, and what is done between steps."""
        return max(0.0, self.stats.seconds - self.draft_seconds - self.verify_seconds)


def total_stats(runs: list[BatchRun]) -> SpecStats:
    """What several runs counted, their seconds too."""
    total = SpecStats()
    for run in runs:
        total.add(run.stats)
    return total


@dataclass(frozen=True, slots=True)
class OutputLength:
    """How long outputs may get. `ignore_eos`: exactly this long, whatever the model says."""

    max_new_tokens: int = 64
    ignore_eos: bool = False


class MeasuredEngine:
    """An engine under the stopwatch. Its draft-length policy goes on learning from run to run."""

    def __init__(self, engine: LocalEngine) -> None:
        self._log = StepLog(engine.parts.draft_length)
        parts = replace(engine.parts, draft_length=self._log)
        self._engine = LocalEngine(parts, engine.tokenizer, engine.config, engine.methods)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def run(self, prompts: list[list[int]], length: OutputLength, temperature: float = 0.0, seed: int = 0) -> BatchRun:
        """Generate the outputs of these prompts together; prompt i has seed + i."""
        requests = [
            Request(
                prompt,
                SamplingParams(temperature=temperature, seed=seed + index),
                length.max_new_tokens,
                ignore_eos=length.ignore_eos,
            )
            for index, prompt in enumerate(prompts)
        ]
        self._log.clear()
        started = time.perf_counter()
        seqs = self._engine.run(requests)
        seconds = time.perf_counter() - started
        stats = SpecStats()
        for seq in seqs:
            stats.add(seq.stats)
        stats.seconds = seconds
        unseen = self._engine.info.device != "cpu"
        return BatchRun([seq.generated for seq in seqs], stats, self._log.timings, self._log.steps, unseen)
