"""Several drafters for one sequence, and in every step the one that saves the most time.

Lookups (the sequence's own past, a client's prediction) take next to no time and sometimes gain many tokens; a head or
a draft model gains a few nearly always and takes time. So in every step the lookups draft, and what their draft tokens
are worth is known before they are verified (core/draft_value.py); what the others save is known from their record. The
best of all is sent. One that has not been used for long is tried again now and then, within a small share of the time.

The choice depends on the past, and of this step on drafts that are chosen, not drawn: they are functions of the past.
So the output is exactly the target's whichever drafter is chosen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from paceline.core import draft_tree
from paceline.core.cost_model import CostModel, StepTiming
from paceline.core.draft_tree import DraftTree
from paceline.core.draft_value import DraftValue
from paceline.core.probing import ProbeSchedule
from paceline.core.protocols import Drafter
from paceline.core.selective import SelectiveDrafts
from paceline.core.sequence import Sequence
from paceline.core.types import RowOutput, StepResult
from paceline.drafting.head_folder import shipped_head_folder
from paceline.drafting.prediction import Prediction
from paceline.drafting.registry import DrafterContext, DrafterSpec, WeightsNeeded, build_drafter, head_names, options_of
from paceline.drafting.suffix import Suffix
from paceline.errors import OptionError

MAX_LOSS = 8.0  # plain steps that one probe is charged for: more is a hiccup of the machine
READING_WEIGHT = 0.3
FIRST_DRAFTS = 2  # of a drafter, before anything is known of it
MIN_REST = 16  # steps after which what a drafter gains is in doubt
FEW_UNREAD = 16  # tokens that a drafter reads in passing


@dataclass(slots=True)
class _Turns:
    """When a drafter that takes time has its turn, and what it takes to begin again after a rest.

    read     of each sequence: its length when this drafter last drafted for it
    reading  seconds that it needs beyond a draft where it has much to read first
    probed   the sequence that it drafts for in this step although another drafter seems better
    forgone  seconds that the other one would have saved there
    won      seconds that its own draft is expected to save there, less those it took
    """

    schedule: ProbeSchedule = field(default_factory=ProbeSchedule)
    read: dict[int, int] = field(default_factory=dict)
    reading: float = 0.0
    probed: int | None = None
    forgone: float = 0.0
    won: float = 0.0
    seconds: float | None = None  # that it drafted in this step; None: it had no turn

    def cost_of_reading(self, seq: Sequence) -> float:
        return self.reading if len(seq.ids) - self.read.get(seq.seq_id, 0) > FEW_UNREAD else 0.0


class AutoDrafter(Drafter):
    """Chooses a drafter per sequence and step.

    lookups  draft from what is there already, in next to no time; by name
    others   draft with a model or a head, by name
    """

    def __init__(
        self,
        lookups: Mapping[str, Drafter],
        others: Mapping[str, Drafter],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not lookups or set(lookups) & set(others):
            raise OptionError("auto needs at least one lookup, and every drafter a name of its own")
        self.lookups, self.others = dict(lookups), dict(others)
        self._drafters: dict[str, Drafter] = {**lookups, **others}
        self.needs = frozenset().union(*(drafter.needs for drafter in self._drafters.values()))
        self.draft_runner = next((drafter.draft_runner for drafter in self.others.values()), None)
        self._clock = clock
        self._turns = {name: _Turns() for name in self.others}
        self._meter: SelectiveDrafts | None = SelectiveDrafts(DraftValue(CostModel()))  # None: the policy measures
        self._value = self._meter.value
        self._began = self._proposed = 0.0  # when the draft of this step began, and when it was ready

    # --- the protocol -------------------------------------------------------------------------------------------------

    def use_value(self, value: DraftValue, source: str = "") -> None:
        self._value, self._meter = value, None
        for name, drafter in self._drafters.items():
            drafter.use_value(value, name)

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        for drafter in self._drafters.values():
            drafter.begin(seq, prompt)

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        self._began = self._clock()
        trees = self._look_up(seqs, num_draft_tokens)
        for turns in self._turns.values():
            turns.probed = turns.seconds = None
        chosen = [self._choose(seq, tree) if k else None for seq, k, tree in zip(seqs, num_draft_tokens, trees)]
        for name in self.others:
            if name in chosen:
                limits = [k if name == own else 0 for k, own in zip(num_draft_tokens, chosen)]
                self._draft_with(name, seqs, limits, trees)
        if self._meter is not None:
            self._meter.cut(seqs, trees, num_draft_tokens)  # noted, and sent whole
        self._proposed = self._clock()
        return trees

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        if self._meter is not None:
            self._measure(self._meter, seqs, results)
        self._settle(seqs)
        for drafter in self._drafters.values():
            drafter.observe(seqs, results)

    def end(self, seq: Sequence) -> None:
        for turns in self._turns.values():
            turns.read.pop(seq.seq_id, None)
        for drafter in self._drafters.values():
            drafter.end(seq)

    # --- lookups ------------------------------------------------------------------------------------------------------

    def _look_up(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        drafts: list[list[DraftTree]] = [[] for _ in seqs]
        for name, lookup in self.lookups.items():
            for own, tree in zip(drafts, lookup.propose(seqs, num_draft_tokens)):
                if len(tree):
                    own.append(replace(tree, source=name))
        return [self._best(seq, own) for seq, own in zip(seqs, drafts)]

    def _best(self, seq: Sequence, drafts: list[DraftTree]) -> DraftTree:
        if len(drafts) <= 1:
            return drafts[0] if drafts else draft_tree.empty()
        return max(drafts, key=lambda tree: self._value.gain(seq, tree))

    # --- choosing -----------------------------------------------------------------------------------------------------

    def _choose(self, seq: Sequence, tree: DraftTree) -> str | None:
        """The drafter that drafts for a sequence instead of the lookups; None: their tree is best."""
        if not self.others:
            return None
        best, gain = None, self._value.gain(seq, tree) if len(tree) else 0.0
        for name, turns in self._turns.items():
            own = self._value.usual_gain(self._value.record(seq, name))
            if own - turns.cost_of_reading(seq) / FEW_UNREAD > gain:
                best, gain = name, own
        return self._due(seq, best, gain) or best

    def _due(self, seq: Sequence, best: str | None, gain: float) -> str | None:
        """A drafter whose probe is due: it drafts although another one seems better. One sequence at a time."""
        plain = self._value.costs.plain_pass(1)
        for name, turns in self._turns.items():
            if name == best or turns.probed is not None:
                continue
            turns.schedule.open(plain, 0.0)
            record = self._value.record(seq, name)
            if record.num_drafts >= FIRST_DRAFTS and turns.schedule.rested < MIN_REST:
                continue  # what it gains is known
            lost = max(0.0, gain - self._value.usual_gain(record))
            turns.schedule.reading = turns.cost_of_reading(seq)
            turns.schedule.cost = lost + turns.schedule.reading
            if turns.schedule.is_due(turns.schedule.cost, plain, sure=record.num_drafts > 1):
                turns.probed, turns.forgone = seq.seq_id, gain
                return name
        return None

    def _draft_with(self, name: str, seqs: list[Sequence], limits: list[int], trees: list[DraftTree]) -> None:
        """Let one drafter draft for the sequences that chose it, where it can."""
        turns, began = self._turns[name], self._clock()
        lengths = [self._length(name, seq, limit) if limit else 0 for seq, limit in zip(seqs, limits)]
        drafts = self._drafters[name].propose(seqs, lengths)
        turns.seconds = self._clock() - began
        for index, (seq, tree) in enumerate(zip(seqs, drafts)):
            if lengths[index] and len(tree):
                self._note_reading(turns, name, seq, tree)
                trees[index] = replace(tree, source=name)
        self._weigh(turns, seqs, trees)

    def _weigh(self, turns: _Turns, seqs: list[Sequence], trees: list[DraftTree]) -> None:
        """What the probe of this step wins, if there is one."""
        saved = next((self._value.gain(seq, tree) for seq, tree in zip(seqs, trees) if seq.seq_id == turns.probed), 0.0)
        turns.won = saved - turns.forgone - (turns.seconds or 0.0)

    def _length(self, name: str, seq: Sequence, limit: int) -> int:
        """Where confidences tell how much is sent, all there is room for; else what has paid best by depth."""
        record = self._value.record(seq, name)
        return limit if record.states_confidence else self._value.best_length(seq, name, limit)

    def _note_reading(self, turns: _Turns, name: str, seq: Sequence, tree: DraftTree) -> None:
        if len(seq.ids) - turns.read.get(seq.seq_id, 0) > FEW_UNREAD and turns.seconds is not None:
            usual = self._value.record(seq, name).draft.at(tree.num_draft_tokens)
            turns.reading += READING_WEIGHT * (max(0.0, turns.seconds - usual) - turns.reading)
        turns.read[seq.seq_id] = len(seq.ids)

    # --- after a step -------------------------------------------------------------------------------------------------

    def _settle(self, seqs: list[Sequence]) -> None:
        """Charge probes with what they took and did not save."""
        plain = self._value.costs.plain_pass(max(1, len(seqs)))
        for turns in self._turns.values():
            if turns.seconds is None:
                turns.schedule.passed(plain, plain)
                continue
            won = max(turns.won, -MAX_LOSS * plain)
            turns.schedule.drafted(won, plain, probe=turns.probed is not None)
            turns.forgone = 0.0

    def _measure(self, meter: SelectiveDrafts, seqs: list[Sequence], results: list[StepResult]) -> None:
        """Without a policy that measures, this drafter's own clock does."""
        trees = [result.tree for result in results]
        timing = StepTiming(
            self._proposed - self._began,
            self._clock() - self._proposed,
            len(seqs) + sum(map(len, trees)),
            max((tree.num_draft_tokens for tree in trees), default=0),
            len(seqs),
            sum(tree.num_draft_tokens > 0 for tree in trees),
        )
        meter.observe(seqs, results, timing, caught_up=False)
        self._value.costs.observe(replace(timing, num_draft_tokens=0))


# --- building ---------------------------------------------------------------------------------------------------------


def build(context: DrafterContext) -> AutoDrafter:
    """Lookups, and beside them the draft model if one is named, or else the heads that come with paceline."""
    without_options = replace(context, options={})
    others: dict[str, Drafter] = {}
    if context.draft_model is not None:
        others["draft_model"] = build_drafter("draft_model", without_options)
    else:
        shipped = [method for method in head_names() if shipped_head_folder(method, context.target) is not None]
        others |= {method: build_drafter(method, without_options) for method in shipped}
    return AutoDrafter({"suffix": Suffix(**context.options), "prediction": Prediction()}, others)


SPEC = DrafterSpec(
    name="auto",
    summary="lookups beside a draft model or head; each step uses the one that saves the most time",
    weights=WeightsNeeded.NONE,
    build=build,
    options=options_of(Suffix),
    per_request=False,
)
