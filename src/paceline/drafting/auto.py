"""Several drafters for one sequence, and in every step the one with the most tokens per second.

A lookup in the sequence's own past (suffix) is free and sometimes gains many tokens; a head or draft model gains a few
nearly always and takes time. So before a step the lookup forecasts how many of its draft tokens are accepted, the
others have a record of theirs, and both are divided by the seconds their steps take.

The choice depends on the past alone: the tokens of the sequence, what was accepted, how long it took. No draft token is
looked at before choosing, so the output is exactly the target's whichever drafter is chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Drafter
from paceline.core.sequence import Sequence
from paceline.core.types import RowOutput, StepResult
from paceline.drafting.head_folder import shipped_head_folder
from paceline.drafting.registry import DrafterContext, DrafterSpec, WeightsNeeded, build_drafter, options_of
from paceline.drafting.suffix import Suffix
from paceline.drafting.suffix_automaton import Forecast
from paceline.errors import OptionError

DECAY = 0.9  # weight of the past against one more step
FIRST_ESTIMATE = 2.0  # accepted tokens per step a drafter is assumed to have before its first step
RETRY_STEPS = 32  # after which a drafter that was not chosen is tried again: sequences change
LOOKUP = "lookup"


class ForecastingDrafter(Drafter, Protocol):
    """A drafter that knows, without drawing anything, how many of its draft tokens it expects to be accepted."""

    def forecast(self, seq: Sequence, num_draft_tokens: int) -> Forecast: ...


@dataclass(slots=True)
class MovingAverage:
    """An exponential moving average. The first sample replaces the initial estimate."""

    value: float
    initial: bool = True

    def add(self, sample: float) -> None:
        self.value = sample if self.initial else DECAY * self.value + (1 - DECAY) * sample
        self.initial = False


@dataclass(slots=True)
class ForecastCalibration:
    """Accepted to expected draft tokens of the lookup, recently. Without new samples it returns to 1."""

    accepted: float = 0.0
    expected: float = 0.0

    def add(self, accepted: float, expected: float) -> None:
        self.accepted = DECAY * self.accepted + accepted
        self.expected = DECAY * self.expected + expected

    @property
    def ratio(self) -> float:
        return (1 + self.accepted) / (1 + self.expected)


@dataclass(slots=True)
class _DrafterRecord:
    """What the drafters have achieved for one sequence."""

    accepted: dict[str, MovingAverage]  # draft tokens per step
    calibration: ForecastCalibration = field(default_factory=ForecastCalibration)
    idle_steps: dict[str, int] = field(default_factory=dict)  # since each drafter was last chosen
    chosen: str = LOOKUP
    expected: float = 0.0  # accepted tokens of the lookup in this step


class AutoDrafter(Drafter):
    """Chooses a drafter per sequence and step.

    lookup  drafts from the sequence itself
    others  draft with a model or a head, by name
    """

    def __init__(
        self, lookup: ForecastingDrafter, others: Mapping[str, Drafter], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        if LOOKUP in others:
            raise OptionError(f"a drafter beside the lookup cannot be called {LOOKUP!r}")
        self.lookup, self.others = lookup, dict(others)
        self._drafters: tuple[Drafter, ...] = (lookup, *self.others.values())
        self.needs = frozenset().union(*(drafter.needs for drafter in self._drafters))
        self.draft_runner = next((drafter.draft_runner for drafter in self.others.values()), None)
        self._clock = clock
        self._records: dict[int, _DrafterRecord] = {}
        self._draft_seconds = {name: MovingAverage(0.0) for name in (LOOKUP, *self.others)}
        self._pass_seconds = {name: MovingAverage(0.0) for name in (LOOKUP, *self.others)}
        self._proposed_at = 0.0

    # --- the protocol -------------------------------------------------------------------------------------------------

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        self._record(seq)
        for drafter in self._drafters:
            drafter.begin(seq, prompt)

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        start = self._clock()
        forecasts = [self.lookup.forecast(seq, k) for seq, k in zip(seqs, num_draft_tokens)]
        trees = [forecast.tree for forecast in forecasts]
        self._draft_seconds[LOOKUP].add(self._clock() - start)
        for seq, k, forecast in zip(seqs, num_draft_tokens, forecasts):
            self._choose(self._record(seq), k, forecast.expected)
        for name in self.others:
            self._draft_with(name, seqs, num_draft_tokens, trees)
        self._proposed_at = self._clock()
        return trees

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        seconds = self._clock() - self._proposed_at
        for name in {self._record(seq).chosen for seq, result in zip(seqs, results) if result.tree.num_draft_tokens}:
            self._pass_seconds[name].add(seconds)
        for seq, result in zip(seqs, results):
            self._learn(self._record(seq), result)
        for drafter in self._drafters:
            drafter.observe(seqs, results)

    def end(self, seq: Sequence) -> None:
        self._records.pop(seq.seq_id, None)
        for drafter in self._drafters:
            drafter.end(seq)

    # --- choosing -----------------------------------------------------------------------------------------------------

    def _record(self, seq: Sequence) -> _DrafterRecord:
        record = self._records.get(seq.seq_id)
        if record is None:
            # The records of other sequences are not used: the choice would depend on the batch.
            estimates = {name: MovingAverage(FIRST_ESTIMATE) for name in self.others}
            record = self._records[seq.seq_id] = _DrafterRecord(estimates)
        return record

    def _choose(self, record: _DrafterRecord, num_draft_tokens: int, expected: float) -> None:
        """Choose the drafter of the next step from the tokens and the record before it."""
        rates = {LOOKUP: (1 + record.calibration.ratio * expected) / self._seconds(LOOKUP)}
        for name, accepted in record.accepted.items():
            rates[name] = (1 + min(accepted.value, num_draft_tokens)) / self._seconds(name)
        best = max(rates, key=rates.__getitem__)
        for name in self.others:
            idle = record.idle_steps.get(name, 0) + (num_draft_tokens > 0)
            record.idle_steps[name] = 0 if name == best else idle
            if record.idle_steps[name] >= RETRY_STEPS and best == LOOKUP:
                best, record.idle_steps[name] = name, 0
        record.chosen, record.expected = best, expected

    def _seconds(self, name: str) -> float:
        """The time of a step of this drafter; a pass not timed yet is assumed to take as long as the lookup's."""
        target_pass = self._pass_seconds[name]
        if target_pass.initial:
            target_pass = self._pass_seconds[LOOKUP]
        return self._draft_seconds[name].value + target_pass.value or 1.0

    def _draft_with(self, name: str, seqs: list[Sequence], num_draft_tokens: list[int], trees: list[DraftTree]) -> None:
        """Let one drafter draft for the sequences that chose it. It gets all of them, to stay in step with them."""
        chosen = [self._record(seq).chosen == name for seq in seqs]
        lengths = [k if own else 0 for k, own in zip(num_draft_tokens, chosen)]
        start = self._clock()
        drafts = self.others[name].propose(seqs, lengths)
        if any(lengths):
            self._draft_seconds[name].add(self._clock() - start)
        for index, own in enumerate(chosen):
            if own:
                trees[index] = drafts[index]

    def _learn(self, record: _DrafterRecord, result: StepResult) -> None:
        if record.chosen == LOOKUP:
            record.calibration.add(result.accepted, record.expected)
            return
        record.calibration.add(0.0, 0.0)
        if result.tree.num_draft_tokens:
            record.accepted[record.chosen].add(result.accepted)


# --- building ---------------------------------------------------------------------------------------------------------


def build(context: DrafterContext) -> AutoDrafter:
    """Suffix lookup, and beside it the draft model if one is named, or else the head that comes with paceline."""
    without_options = replace(context, options={})
    others: dict[str, Drafter] = {}
    if context.draft_model is not None:
        others["draft_model"] = build_drafter("draft_model", without_options)
    elif shipped_head_folder("eagle", context.target) is not None:
        others["eagle"] = build_drafter("eagle", without_options)
    return AutoDrafter(Suffix(**context.options), others)


SPEC = DrafterSpec(
    name="auto",
    summary="suffix lookup beside a draft model or head; each step uses the one with the most tokens per second",
    weights=WeightsNeeded.NONE,
    build=build,
    options=options_of(Suffix),
    per_request=False,
)
