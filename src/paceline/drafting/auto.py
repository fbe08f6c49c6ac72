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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.draft_value import DraftValue
from paceline.core.looped_steps import LoopedSteps
from paceline.core.probing import PROBE_STEPS
from paceline.core.protocols import Drafter, Preparation, Runner
from paceline.core.sequence import Sequence
from paceline.core.types import Capability, RowOutput, StepResult, WarmupPlan
from paceline.device.properties import on_host
from paceline.drafting.chooser import Chooser, OwnMeasurements, Turns
from paceline.drafting.head_folder import optional_head_folder, shipped_head_folder
from paceline.drafting.prediction import Prediction
from paceline.drafting.registry import (
    DrafterContext,
    DrafterSpec,
    WeightsNeeded,
    build_drafter,
    head_names,
    method_of_head,
    options_of,
    spec,
)
from paceline.drafting.suffix import Suffix
from paceline.errors import OptionError
from paceline.heads.registry import kind_in

DRAFT_MODEL = "draft_model"
DOUBT = 0.25  # plain steps that lookups must promise to gain before a loop ends for them


@dataclass(frozen=True, slots=True)
class _Choice:
    """The drafts of the lookups for a step, and the drafter that is used instead of them, if any."""

    lengths: list[int]  # of the sequences
    trees: list[DraftTree]
    names: list[str | None]

    @property
    def drafter(self) -> str | None:
        """The one that drafts for all sequences; None: they differ, or lookups do."""
        return self.names[0] if len(set(self.names)) == 1 else None


@dataclass(frozen=True, slots=True)
class _Unsent:
    """A draft of lookups that another drafter's was preferred to, behind so many tokens of the sequence."""

    tree: DraftTree
    position: int
    reach: int  # tokens after which all of it can be compared


@dataclass(frozen=True, slots=True)
class _Loop:
    """Steps in a row for which one drafter drafts.

    limits   draft tokens that each sequence may have
    lengths  that the drafter was asked for
    """

    name: str
    seqs: list[Sequence]
    limits: list[int]
    lengths: list[int]

    def unfinished(self) -> _Loop:
        """The part whose sequences are not over."""
        places = [place for place, seq in enumerate(self.seqs) if not seq.finished]
        parts = ([own[place] for place in places] for own in (self.limits, self.lengths))
        return _Loop(self.name, [self.seqs[place] for place in places], *parts)


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
        self._observing = [drafter for drafter in self._drafters.values() if _observes(drafter)]
        self.needs = frozenset().union(*(drafter.needs for drafter in self._drafters.values()))
        self.draft_runner = next((drafter.draft_runner for drafter in self.others.values()), None)
        self._clock = clock
        self._shared: Chooser | None = None  # where the draft-length policy measures
        self._own = OwnMeasurements(self.others)
        self._never_loops = False  # a CPU takes no steps in a row: it is asked once
        self._unsent: dict[int, _Unsent] = {}  # of sequences in a loop
        self._choice: _Choice | None = None  # for the step that is under way, where it was made before `propose`

    # --- the protocol -------------------------------------------------------------------------------------------------

    def preparations(self, plan: WarmupPlan) -> list[Preparation]:
        return [piece for drafter in self._drafters.values() for piece in drafter.preparations(plan)]

    def rehearsed(self) -> list[Drafter]:
        return [self, *self.others.values()]

    def use_value(self, value: DraftValue, source: str = "") -> None:
        self._shared = Chooser(value, self.others)
        for name, drafter in self._drafters.items():
            drafter.use_value(value, name)

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        for drafter in self._drafters.values():
            drafter.begin(seq, prompt)

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        if len(seqs) == 1 and self._shared is not None and self._choice is None:
            return [self._propose_alone(seqs[0], num_draft_tokens[0], self._shared)]
        began = self._clock() if self._shared is None else 0.0
        choosers = [self._shared or self._own.chooser(seq) for seq in seqs]
        choice, self._choice = self._choice, None
        if choice is None or choice.lengths != [len(seq.ids) for seq in seqs]:
            choice = self._choose(seqs, num_draft_tokens, choosers)
        trees = choice.trees
        for name in self.others if any(choice.names) else ():
            limits = [k if name == own else 0 for k, own in zip(num_draft_tokens, choice.names)]
            if any(limits):
                self._draft_with(name, seqs, limits, trees, choosers)
        if self._shared is None:
            self._own.proposed(seqs, trees, num_draft_tokens, began, self._clock())
        return trees

    def look_up(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree] | None:
        """By the lookups alone: what the others gain is asked again after plain steps in a row."""
        if self._shared is None:
            return None
        return self._look_up(seqs, num_draft_tokens, [self._shared] * len(seqs))

    def draft_loop(
        self, target: Runner, seqs: list[Sequence], num_draft_tokens: list[int], num_steps: int
    ) -> LoopedSteps | None:
        """Where one drafter drafts for all sequences. The lookups go on looking, and end the loop when they know
        better."""
        if self._shared is None or self._never_loops:
            return None
        began, choosers = self._clock(), [self._shared] * len(seqs)
        choice = self._choose(seqs, num_draft_tokens, choosers)
        steps, loop = None, None
        if choice.drafter is not None and self._others_can_wait(choice.drafter):
            loop = self._loop(choice.drafter, seqs, num_draft_tokens, self._shared)
            steps = self.others[loop.name].draft_loop(target, seqs, loop.lengths, num_steps)
        if steps is None or loop is None:
            self._choice = choice
            self._never_loops = loop is not None and on_host(target.info.device)
            return None
        turns = self._shared.turns[loop.name]
        if not any(map(turns.must_read, seqs)):
            steps = self._timed(steps, began, turns)
        return self._looped(steps, loop, self._shared)

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        if self._shared is None:
            self._own.observe(seqs, results, self._clock())
        else:
            self._shared.settle(len(seqs))
        for drafter in self._observing:
            drafter.observe(seqs, results)

    def end(self, seq: Sequence) -> None:
        if self._shared is not None:
            self._shared.forget(seq)
        self._own.forget(seq)
        self._unsent.pop(seq.seq_id, None)
        for drafter in self._drafters.values():
            drafter.end(seq)

    # --- loops --------------------------------------------------------------------------------------------------------

    def _others_can_wait(self, name: str) -> bool:
        """Whether no other drafter needs the states of every step, which a loop keeps to itself."""
        others = [drafter for other, drafter in self.others.items() if other != name]
        return not any(Capability.HIDDEN_STATES in drafter.needs for drafter in others)

    def _timed(self, steps: LoopedSteps, last: float, turns: Turns) -> LoopedSteps:
        """The same steps; the second one tells what the first took more. last: when they were begun."""
        num_read, first, ends = 0, 0.0, None
        try:
            while True:
                group = steps.send(ends)
                now = self._clock()
                num_read, seconds, last = num_read + 1, now - last, now
                if num_read == 1:
                    first = seconds
                elif num_read == 2:
                    turns.restarted(max(0.0, first - seconds))
                ends = yield group
        except StopIteration:
            return

    def _loop(self, name: str, seqs: list[Sequence], limits: list[int], chooser: Chooser) -> _Loop:
        return _Loop(name, seqs, limits, [chooser.length(seq, name, k) for seq, k in zip(seqs, limits)])

    def _looped(self, steps: LoopedSteps, loop: _Loop, chooser: Chooser) -> LoopedSteps:
        ends, num_steps = None, 0
        try:
            while True:
                group, num_steps = steps.send(ends), num_steps + 1
                running = [place for place, seq in enumerate(loop.seqs) if not seq.finished]
                counts = [len(group[place].verified.accepted) for place in running]
                chooser.looped([loop.seqs[place] for place in running], loop.name, counts)
                told = yield [replace(step, source=loop.name) for step in group]
                ends = told or self._is_over(loop.unfinished(), chooser, num_steps)
        except StopIteration:
            return
        finally:
            chooser.loop_ended(loop.name, num_steps)

    def _is_over(self, loop: _Loop, chooser: Chooser, num_steps: int) -> bool:
        """Whether it pays to end a loop. A probe first takes the steps that tell what its drafter gains: left for a
        lookup before that, it would have to begin again. If it pays it is a loop like others from then on."""
        if chooser.turns[loop.name].probed is not None:
            if num_steps < PROBE_STEPS - 1:  # one more is under way
                return False
            again = self._loop(loop.name, loop.seqs, loop.limits, chooser)
            if again.lengths != loop.lengths or not chooser.probe_pays(loop.seqs, loop.name):
                return True
        return self._lookup_is_best(loop, chooser)

    def _lookup_is_best(self, loop: _Loop, chooser: Chooser) -> bool:
        """Whether it pays to end the loop for what the lookups know, over all sequences.

        One more step of the loop is under way, so only what lies behind its tokens counts; and the next loop starts
        slowly. What a lookup promises often comes to nothing where it would be used: a small gain is no reason.
        """
        name, seqs = loop.name, loop.seqs
        size, plain = self._size(seqs), chooser.value.costs.plain_pass(len(seqs))
        gain = -chooser.turns[name].restart - DOUBT * plain
        behind = [1 + round(chooser.value.record(seq, name).stats.of(size).tokens) for seq in seqs]
        further = [min(k + own, seq.remaining_tokens - 1) for seq, k, own in zip(seqs, loop.limits, behind)]
        trees = self._look_up(seqs, further, [chooser] * len(seqs))
        for seq, tree, k, own in zip(seqs, trees, loop.limits, behind):
            self._learn_unsent(seq, tree, chooser)
            gain += chooser.value.gain_behind(seq, tree, own, size) if len(tree) else 0.0
            gain -= chooser.usual_gain(seq, name, chooser.promised(seq, tree, k), size)
        chooser.turns[name].left = gain > 0
        return gain > 0

    def _learn_unsent(self, seq: Sequence, tree: DraftTree, chooser: Chooser) -> None:
        """Lookups that are not sent for long would be believed for long: what they would have drafted is compared with
        what has come, one draft after another."""
        unsent = self._unsent.get(seq.seq_id)
        if unsent is not None and len(seq.ids) - unsent.position >= unsent.reach:
            chooser.value.record(seq, unsent.tree.source).compare(unsent.tree, seq.ids[unsent.position :])
            del self._unsent[seq.seq_id]
        if seq.seq_id not in self._unsent and len(tree):
            self._unsent[seq.seq_id] = _Unsent(tree, len(seq.ids), max(draft_tree.depths(tree.parents)) + 1)

    # --- drafting -----------------------------------------------------------------------------------------------------

    def _size(self, seqs: list[Sequence]) -> int:
        """Of the batch that drafts are weighed in. Where every sequence learns for itself, each is alone."""
        return 1 if self._shared is None else len(seqs)

    def _choose(self, seqs: list[Sequence], num_draft_tokens: list[int], choosers: list[Chooser]) -> _Choice:
        trees = self._look_up(seqs, num_draft_tokens, choosers)
        names = [
            chooser.choose(seq, tree, self._size(seqs)) if k else None
            for chooser, seq, k, tree in zip(choosers, seqs, num_draft_tokens, trees)
        ]
        return _Choice([len(seq.ids) for seq in seqs], trees, names)

    def _propose_alone(self, seq: Sequence, k: int, chooser: Chooser) -> DraftTree:
        """For one sequence, without the lists of a batch: on a CPU what is done in every step shows."""
        drafts: list[DraftTree] = []
        for name, lookup in self.lookups.items():
            [tree] = lookup.propose([seq], [k])
            if tree.parents:
                drafts.append(draft_tree.with_source(tree, name))
                if chooser.is_sure(seq, drafts[-1]):
                    break
        trees = [chooser.best(seq, drafts, 1)]
        chosen = chooser.choose(seq, trees[0], 1) if k else None
        if chosen is not None:
            self._draft_with(chosen, [seq], [k], trees, [chooser])
        return trees[0]

    def _look_up(self, seqs: list[Sequence], num_draft_tokens: list[int], choosers: list[Chooser]) -> list[DraftTree]:
        """Their lookups one after another, until one is sure: looking further would take time and find the same."""
        drafts: list[list[DraftTree]] = [[] for _ in seqs]
        limits = num_draft_tokens
        for name, lookup in self.lookups.items():
            for index, tree in enumerate(lookup.propose(seqs, limits)):
                if tree.parents:
                    drafts[index].append(draft_tree.with_source(tree, name))
                    if choosers[index].is_sure(seqs[index], drafts[index][-1]):
                        limits = [0 if place == index else k for place, k in enumerate(limits)]
        if not any(drafts):
            return [draft_tree.empty()] * len(seqs)
        size = self._size(seqs)
        return [chooser.best(seq, own, size) for chooser, seq, own in zip(choosers, seqs, drafts)]

    def _draft_with(
        self, name: str, seqs: list[Sequence], limits: list[int], trees: list[DraftTree], choosers: list[Chooser]
    ) -> None:
        """Let one drafter draft for the sequences that chose it, where it can."""
        began = self._clock()
        parts = zip(choosers, seqs, limits)
        lengths = [chooser.length(seq, name, limit) if limit else 0 for chooser, seq, limit in parts]
        drafts = self.others[name].propose(seqs, lengths)
        seconds = self._clock() - began
        for index, tree in enumerate(drafts):
            if lengths[index] and len(tree):
                trees[index] = draft_tree.with_source(tree, name)
                choosers[index].drafted(seqs[index], name, trees[index], seconds, self._size(seqs))


def _observes(drafter: Drafter) -> bool:
    """Whether it makes anything of what became of drafts. Calls that do nothing take time in every step."""
    return type(drafter).observe is not Drafter.observe


# --- building ---------------------------------------------------------------------------------------------------------


def _named_method(draft_model: Any) -> str | None:
    """The method that drafts with what the user has named: a draft model, or a trained head."""
    if draft_model is None:
        return None
    folder = optional_head_folder(draft_model) if isinstance(draft_model, (str, Path)) else None
    kind = None if folder is None else kind_in(folder)
    return DRAFT_MODEL if kind is None else method_of_head(kind)


def build(context: DrafterContext) -> AutoDrafter:
    """Lookups, and beside them the draft model or head that is named, or else a head that comes with paceline."""
    without_options = replace(context, options={})
    named = _named_method(context.draft_model)
    if named is None:
        # One is enough: each head reads the target's states of every step, whether it drafts or not.
        heads = sorted(head_names(), key=lambda method: not spec(method).one_pass)
        named = next((method for method in heads if shipped_head_folder(method, context.target) is not None), None)
    others = {} if named is None else {named: build_drafter(named, without_options)}
    return AutoDrafter({"prediction": Prediction(), "suffix": Suffix(**context.options)}, others)


SPEC = DrafterSpec(
    name="auto",
    summary="lookups beside a draft model or head; each step uses the one that saves the most time",
    weights=WeightsNeeded.NONE,
    build=build,
    options=options_of(Suffix),
    per_request=False,
    reads_prediction=True,
)
