"""Drafts that state their confidence, or whose drafter chooses among several: how much of each is sent is decided
after it was made.

So the drafter is asked for as much as may pay, since a block takes one pass whatever its length and a lookup takes
none, and what does not pay stays out of the target's pass. Where longer drafts take longer, as on a CPU, it is asked
for as many as win more than their making takes (depth_gains.py). Whether to ask at all follows from what
asking has gained lately, less the time that making drafts took. Where it loses, probes within a small share of the
time go on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.cost_model import StepTiming
from paceline.core.draft_tree import DraftTree
from paceline.core.draft_value import CutDrafts, DraftValue, is_cuttable, kind_of
from paceline.core.probing import ProbeSchedule
from paceline.core.sequence import Sequence
from paceline.core.source_record import ByBatchSize, DraftStats, new_stats
from paceline.core.types import StepResult

HORIZON = 64  # steps within which drafting must earn what the drafter has to read first
MAX_LOSS = 2.0  # plain steps that one draft may count to have lost
PLAIN_EVERY = 128  # steps with draft tokens after which a plain one keeps its cost up to date


@dataclass(slots=True)
class _Kind:
    """Sequences that are drafted for in one way."""

    totals: ByBatchSize[DraftStats] = field(default_factory=new_stats)  # of its drafts, whatever their source
    schedule: ProbeSchedule = field(default_factory=ProbeSchedule)
    is_probe: bool = False  # of the step that is under way: one sequence is drafted for to find out, …
    pays: bool = False  # … some are because it pays
    won: float = 0.0  # seconds, in the last step that asked
    owed: float = 0.0  # seconds that the drafter has read for the probe under way: it pays when it ends, and not before


@dataclass(frozen=True, slots=True)
class Unread:
    """Tokens that a drafter must read before it drafts for a sequence, and for all of the batch."""

    own: int
    of_all: int


@dataclass(frozen=True, slots=True)
class _Asked:
    """A draft that was made in this step; empty where the drafter had none."""

    tree: DraftTree
    survival: list[float]  # of every node that is sent: the probability that it and all before it are accepted
    added: float  # seconds, to the pass

    @property
    def tokens(self) -> float:
        """That it is expected to bring."""
        return sum(self.survival)


class SelectiveDrafts:
    """Asks for drafts of the kinds that state confidences, cuts them, and learns what they are worth."""

    def __init__(self, value: DraftValue) -> None:
        self.value = value
        self._kinds: dict[str, _Kind] = {}
        self._asked: dict[int, _Asked] = {}  # by sequence, in the step that is under way
        self._wide_steps = 0  # since a plain one
        self._looped = False  # whether steps are taken in a row

    def covers(self, seq: Sequence) -> bool:
        """Whether drafts for this sequence are known to state their confidence."""
        return kind_of(seq) in self._kinds

    # --- before a step ------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Before the first sequence of a step."""
        for kind in self._kinds.values():
            kind.is_probe = kind.pays = False

    def ask(self, seq: Sequence, limit: int, unread: Unread, num_seqs: int) -> int:
        """Draft tokens to ask for in a batch of so many: all that may be sent, or none.

        One sequence is enough for a probe, except where a device takes steps in a row: only if all have draft tokens,
        so that the drafter reads all of them first.
        """
        if self._wide_steps >= PLAIN_EVERY:
            return 0
        kind, costs = self._kinds[kind_of(seq)], self.value.costs
        reading, plain = costs.catching_up(unread.own), costs.plain_pass(num_seqs)
        probed, first = (num_seqs, unread.of_all) if self._looped else (1, unread.own)
        kind.schedule.open(plain, costs.catching_up(first))
        gain, length = self.value.usual_gain(kind.totals, num_seqs), self.value.useful_length(seq, limit)
        if gain >= reading / HORIZON:
            kind.pays = True
            return length
        if kind.is_probe and not self._looped:
            return 0
        reading = costs.catching_up(first)
        kind.schedule.reading, kind.schedule.cost = reading, probed * max(0.0, -gain) + reading
        if not kind.schedule.is_due(kind.schedule.cost, plain, sure=kind.totals.of(num_seqs).num_drafts > 1):
            return 0
        kind.is_probe = True
        return length

    def cut(self, seqs: list[Sequence], trees: list[DraftTree], num_draft_tokens: list[int]) -> list[DraftTree]:
        """What is sent of the trees. A kind is covered once its drafts state confidences, or name their source."""
        asked = self._covered(seqs, trees, num_draft_tokens)
        if not asked:
            return trees
        drafts = self.value.cut(seqs, trees)
        self._note(seqs, trees, asked, drafts)
        return drafts.trees

    def sent(self, seqs: list[Sequence], trees: list[DraftTree], num_draft_tokens: list[int]) -> None:
        """The same where all of the trees was sent."""
        asked = self._covered(seqs, trees, num_draft_tokens)
        if asked:
            self._note(seqs, trees, asked, self.value.whole(seqs, trees))

    def _covered(self, seqs: list[Sequence], trees: list[DraftTree], num_draft_tokens: list[int]) -> list[int]:
        """The places of sequences that were asked for and whose kind is covered, by these trees at the latest."""
        self._asked.clear()
        for seq, tree in zip(seqs, trees):
            if (tree.source or is_cuttable(seq, tree)) and not self.covers(seq):
                self._kinds[kind_of(seq)] = _Kind()
        return [index for index, seq in enumerate(seqs) if num_draft_tokens[index] and self.covers(seq)]

    def _note(self, seqs: list[Sequence], trees: list[DraftTree], asked: list[int], drafts: CutDrafts) -> None:
        for index in asked:
            self._asked[seqs[index].seq_id] = _Asked(trees[index], drafts.survival[index], drafts.added[index])

    # --- after a step -------------------------------------------------------------------------------------------------

    def observe(self, seqs: list[Sequence], results: list[StepResult], timing: StepTiming, *, caught_up: int) -> int:
        """Learn from a step; returns how many sequences were asked for. caught_up: tokens that drafters had to read
        first, if they were many: the time of their drafts is unusual, and probes pay for it."""
        self._looped |= timing.looped
        asked = [seq for seq in seqs if seq.seq_id in self._asked]
        share = timing.draft_seconds / len(asked) if asked else 0.0
        drafting = 0.0
        for seq, result in zip(seqs, results):
            own = self._asked.get(seq.seq_id)
            if own is not None:
                if len(own.tree):
                    self._learn(seq, own, result, timing.num_seqs)
                known = share if timing.clean and not caught_up else None
                drafting += self._observe_draft(seq, own, known, timing.num_seqs)
        self._asked.clear()
        if asked or self._kinds:
            self.value.stepped(timing, results, drafting)
            self._observe_step(seqs, asked, timing, self.value.costs.catching_up(caught_up))
        return len(asked)

    def _learn(self, seq: Sequence, own: _Asked, result: StepResult, num_seqs: int) -> None:
        """How often the draft tokens are accepted, and what those that were sent win."""
        self.value.learn(seq, own.tree, result)
        worth, sent = self.value.worth.of(own.tree.source, num_seqs), own.survival[: result.tree.num_made]
        added = own.added / max(1, len(own.survival))
        won = [max(0.0, survival * worth - added) for survival in sent]
        self.value.record(seq, own.tree.source).depths.observe(own.tree.num_made, won)

    def _observe_draft(self, seq: Sequence, own: _Asked, seconds: float | None, num_seqs: int) -> float:
        """Returns the seconds that such a draft usually takes."""
        record, count = self.value.record(seq, own.tree.source), own.tree.num_made
        if seconds is None:
            return record.drafts.of(num_seqs).at(count)
        curve = record.drafts.of(num_seqs)
        curve.add(count, seconds)
        making = curve.at(count)
        saved = own.tokens * self.value.token_seconds(num_seqs)
        cost = min(own.added + making, saved + MAX_LOSS * self.value.costs.plain_pass(1))
        record.stats.of(num_seqs).add(own.tokens, cost, self.value.worth.num_steps)
        if saved < cost and own.tree.source:
            return making  # a drafter that chooses among several has tried one that loses; it sees to that itself
        kind = self._kinds[kind_of(seq)]
        kind.won += saved - cost
        kind.totals.of(num_seqs).add(own.tokens, cost)
        return making

    def _observe_step(self, seqs: list[Sequence], asked: list[Sequence], timing: StepTiming, reading: float) -> None:
        plain = self.value.costs.plain_pass(timing.num_seqs)
        self._wide_steps = self._wide_steps + 1 if timing.nodes > timing.num_seqs else 0
        asked_kinds = {kind_of(seq) for seq in asked}
        for name in {kind_of(seq) for seq in seqs} & self._kinds.keys():
            kind = self._kinds[name]
            if name in asked_kinds:
                kind.owed = 0.0 if kind.pays else kind.owed + reading
                kind.schedule.drafted(kind.won, plain, probe=kind.is_probe and not kind.pays)
                kind.won = 0.0
            else:
                kind.schedule.charge(kind.owed, plain)
                kind.owed = 0.0
                kind.schedule.passed(min(timing.seconds, 2 * plain), plain)
