"""Which drafter drafts in a step: what each one's draft will save, when one that rests is tried again, and what that
takes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from paceline.core import draft_tree
from paceline.core.cost_model import CostModel, HiccupFilter, StepTiming
from paceline.core.draft_tree import DraftTree
from paceline.core.draft_value import DraftValue
from paceline.core.probing import ProbeSchedule
from paceline.core.selective import SelectiveDrafts
from paceline.core.sequence import Sequence
from paceline.core.types import StepResult

MAX_LOSS = 8.0  # plain steps that one probe is charged for: more is a hiccup of the machine
READING_WEIGHT = RESTART_WEIGHT = ROW_WEIGHT = 0.3
FIRST_ROW = 8.0  # steps in a row that a drafter is expected to have, before it had any
PROBE_SHARE = 0.004  # of all time: others draft well meanwhile, so that less is missed than where nothing drafts
FIRST_DRAFTS = 2  # of a drafter, before anything is known of it
MIN_REST = 16  # steps after which what a drafter gains is in doubt
FEW_UNREAD = 16  # tokens that a drafter reads in passing
EARNING_DRAFTS = 6  # within which a drafter must earn what it has to read first
PROMISES = (0.5, 2.0, 4.0, 8.0)  # tokens of lookups: what others bring beside them is learnt by these bounds
BESIDE_WEIGHT, BESIDE_FADE = 4.0, 0.98  # steps for which nothing more than usual counts; of a step, by each further one
PLAIN_BEGINS = 0.5  # plain steps that plain steps in a row take to begin, which they also do
SURE = 0.85  # acceptance of a lookup's first token behind which no other lookup is asked


class _Beside:
    """How many tokens more than usual a drafter brings where lookups promise some: what they know is often easy for it
    too, so that its usual gain says too little of what is given up for them."""

    def __init__(self) -> None:
        self._more = [0.0] * (len(PROMISES) + 1)  # tokens, by what was promised; of fading steps
        self._steps = [0.0] * (len(PROMISES) + 1)

    def more(self, promised: float) -> float:
        """At least none. Where nothing is promised it is the usual that counts."""
        index = bisect_right(PROMISES, promised)
        return max(0.0, self._more[index] / (self._steps[index] + BESIDE_WEIGHT)) if index else 0.0

    def learn(self, promised: float, more: float) -> None:
        index = bisect_right(PROMISES, promised)
        self._more[index] = BESIDE_FADE * self._more[index] + more
        self._steps[index] = BESIDE_FADE * self._steps[index] + 1.0


@dataclass(slots=True)
class Turns:
    """When a drafter that takes time has its turn, and what it takes to begin again after a rest.

    idle     steps since its last turn, and of these: those that its schedule has heard of
    beside   what it brings where lookups promise something
    read     of each sequence: its length when this drafter last drafted for it
    reading  seconds that it needs beyond a draft where it has much to read first
    probed   the sequence that it drafts for in this step although another drafter seems better
    forgone  seconds that the other one would have saved there
    restart  seconds that the first of several steps in a row takes more than the others
    row      how many steps in a row it usually has
    left     whether the last ones ended for a lookup
    won      seconds that its own draft is expected to save there, less those it took
    """

    schedule: ProbeSchedule = field(default_factory=lambda: ProbeSchedule(share=PROBE_SHARE))
    idle: int = 0
    told: int = 0
    beside: _Beside = field(default_factory=_Beside)
    read: dict[int, int] = field(default_factory=dict)
    reading: float = 0.0
    probed: int | None = None
    forgone: float = 0.0
    restart: float = 0.0
    row: float = FIRST_ROW
    left: bool = False
    won: float = 0.0
    had_turn: bool = False  # in this step

    def must_read(self, seq: Sequence) -> bool:
        """Whether it has much to read before it drafts for a sequence, such as a prompt."""
        return len(seq.ids) - self.read.get(seq.seq_id, 0) > FEW_UNREAD

    def cost_of_beginning(self, seq: Sequence, otherwise: float = 0.0) -> float:
        """Seconds a step, over those that follow. otherwise: seconds that other steps would take to begin."""
        reading = self.reading / EARNING_DRAFTS if self.must_read(seq) else 0.0
        return reading + max(0.0, self.restart - otherwise) / self.row

    def restarted(self, seconds: float) -> None:
        """Steps in a row have begun, the first of which took so many seconds more, with nothing to read before it. What
        was compiled on the way is forgotten at once."""
        if not self.restart or HiccupFilter.OUTLIER * seconds < self.restart:
            self.restart = seconds
        else:
            bounded = min(seconds, HiccupFilter.OUTLIER * self.restart)
            self.restart += RESTART_WEIGHT * (bounded - self.restart)

    def tell_schedule(self, plain: float) -> None:
        """Of the steps since its last turn. plain: seconds of one."""
        if self.idle > self.told:
            self.schedule.passed(plain, plain, steps=self.idle - self.told)
            self.told = self.idle


class Chooser:
    """Weighs the drafters against each other: for one sequence, or for all where the policy measures."""

    def __init__(self, value: DraftValue, names: Iterable[str]) -> None:
        """names: of the drafters that take time."""
        self.value = value
        self.turns = {name: Turns() for name in names}
        value.worth.draft_beside_lookups(self.turns)
        self._promised: dict[int, float] = {}  # by the lookups before the last step; of each sequence
        self._has_looped = False

    def is_sure(self, seq: Sequence, tree: DraftTree) -> bool:
        """Whether the first token of a draft is nearly certain."""
        if tree.confidence is None:
            return False
        return self.value.record(seq, tree.source).table.rate(tree.confidence[0]) > SURE

    def best(self, seq: Sequence, drafts: list[DraftTree], num_seqs: int) -> DraftTree:
        """Of the drafts of lookups, in a batch of so many."""
        if len(drafts) <= 1:
            return drafts[0] if drafts else draft_tree.empty()
        return max(drafts, key=lambda tree: self.value.gain(seq, tree, num_seqs))

    def choose(self, seq: Sequence, tree: DraftTree, num_seqs: int) -> str | None:
        """The drafter that drafts for a sequence instead of the lookups; None: their tree is best."""
        best, gain = None, self.value.gain(seq, tree, num_seqs) if len(tree) and self.turns else 0.0
        promised, plain_begins = self.promised(seq, tree, len(tree)), 0.0
        nothing_else = gain <= 0
        if nothing_else:
            plain_begins = PLAIN_BEGINS * self.value.costs.plain_pass(num_seqs)
        for name, turns in self.turns.items():
            own = self.usual_gain(seq, name, promised, num_seqs, nothing_else=nothing_else)
            if own > gain and own - turns.cost_of_beginning(seq, plain_begins) > gain:
                best, gain = name, own
        for name, turns in self.turns.items():
            if name != best and turns.probed is None and self._is_due(seq, name, gain, num_seqs):
                turns.probed, turns.forgone = seq.seq_id, gain
                return name
        return best

    def promised(self, seq: Sequence, tree: DraftTree, num_draft_tokens: int) -> float:
        """Tokens that so many of a draft of lookups are expected to bring. Before the first loop none is learnt
        from."""
        nodes = self._has_looped and len(tree)
        promised = sum(self.value.survival(seq, tree)[:num_draft_tokens]) if nodes else 0.0
        if self._has_looped:
            self._promised[seq.seq_id] = promised
        return promised

    def usual_gain(
        self, seq: Sequence, name: str, promised: float, num_seqs: int, *, nothing_else: bool = False
    ) -> float:
        """Seconds that a drafter gains lately where lookups promise so many tokens. nothing_else: the step would be a
        plain one without it."""
        source = name if nothing_else else ""
        usual = self.value.usual_gain(self.value.record(seq, name).stats, num_seqs, source)
        if not promised:
            return usual
        return usual + self.turns[name].beside.more(promised) * self.value.token_seconds(num_seqs)

    def _is_due(self, seq: Sequence, name: str, gain: float, num_seqs: int) -> bool:
        """Whether a drafter drafts although another one seems better, which gains this much: too little is known of it,
        or nothing lately. One sequence at a time."""
        turns, stats = self.turns[name], self.value.record(seq, name).stats
        num_drafts = stats.of(num_seqs).num_drafts
        if num_drafts >= FIRST_DRAFTS and turns.idle < MIN_REST:
            return False  # nearly always: nothing is summed up before it
        plain = self.value.costs.plain_pass(1)
        turns.schedule.open(plain, 0.0)
        turns.tell_schedule(plain)
        turns.schedule.reading = turns.reading if turns.must_read(seq) else 0.0
        lost = max(0.0, gain - self.value.usual_gain(stats, num_seqs))
        turns.schedule.cost = lost + turns.schedule.reading
        return turns.schedule.is_due(turns.schedule.cost, plain, sure=num_drafts > 1)

    def length(self, seq: Sequence, name: str, limit: int) -> int:
        """Where confidences tell how much is sent, what may be sent; else what has paid best by depth."""
        if self.value.record(seq, name).states_confidence:
            return self.value.useful_length(seq, limit, name)
        return self.value.best_length(seq, limit, name)

    def drafted(self, seq: Sequence, name: str, tree: DraftTree, seconds: float, num_seqs: int) -> None:
        """A drafter that takes time has drafted."""
        turns = self.turns[name]
        if turns.must_read(seq):
            usual = self.value.record(seq, name).draft.at(tree.num_draft_tokens)
            turns.reading += READING_WEIGHT * (max(0.0, seconds - usual) - turns.reading)
        turns.read[seq.seq_id], turns.had_turn = len(seq.ids), True
        if seq.seq_id == turns.probed:
            turns.won = self.value.gain(seq, tree, num_seqs) - turns.forgone - seconds

    def looped(self, seqs: list[Sequence], name: str, num_accepted: list[int]) -> None:
        """A drafter has made the drafts of one of several steps in a row. All steps of a probe are one."""
        turns = self.turns[name]
        turns.had_turn, probed, self._has_looped = True, turns.probed, True
        for seq, accepted in zip(seqs, num_accepted):
            usual = self.value.record(seq, name).stats.of(len(seqs))
            if usual.num_drafts >= FIRST_DRAFTS:
                turns.beside.learn(self._promised.get(seq.seq_id, 0.0), accepted - usual.tokens)
            turns.read[seq.seq_id] = len(seq.ids)
            if seq.seq_id == turns.probed:
                turns.won = self.value.usual_gain(self.value.record(seq, name).stats, len(seqs)) - turns.forgone
        self.settle(len(seqs))
        turns.probed = probed

    def probe_pays(self, seqs: list[Sequence], name: str) -> bool:
        """Whether the steps of a probe have shown that the drafter gains something; the loop is none any more then."""
        pays = any(self.usual_gain(seq, name, 0.0, len(seqs)) > 0 for seq in seqs)
        if pays:
            self.turns[name].probed = None
        return pays

    def loop_ended(self, name: str, num_steps: int) -> None:
        """Of one drafter, after so many steps in a row. One that was left for a lookup says nothing: what the next
        beginning takes was weighed then.

        A probe has few steps by design. Where loops were cut short only probes are left, so each of them raises the
        expected number again: it would otherwise stay low for good.
        """
        turns = self.turns[name]
        usual = max(1, num_steps) if turns.probed is None else max(turns.row, FIRST_ROW)
        turns.row += 0.0 if turns.left else ROW_WEIGHT * (usual - turns.row)
        turns.left = False
        turns.probed = None

    def settle(self, num_seqs: int) -> None:
        """After a step: charge probes with what they took and did not save."""
        for turns in self.turns.values():
            if not turns.had_turn:
                turns.idle += 1
                turns.probed = None
                continue
            plain = self.value.costs.plain_pass(max(1, num_seqs))
            turns.tell_schedule(plain)
            won, is_probe = max(turns.won, -MAX_LOSS * plain), turns.probed is not None
            turns.schedule.drafted(won, plain, probe=is_probe)
            turns.probed, turns.had_turn, turns.won, turns.idle, turns.told = None, False, 0.0, 0, 0

    def forget(self, seq: Sequence) -> None:
        for turns in self.turns.values():
            turns.read.pop(seq.seq_id, None)
        self._promised.pop(seq.seq_id, None)


class OwnMeasurements:
    """Where no policy measures (a fixed k), every sequence learns for itself: its output is the same in any batch."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._choosers: dict[int, Chooser] = {}
        self._meters: dict[int, SelectiveDrafts] = {}
        self._began = self._proposed = 0.0  # when the drafts of this step began, and when they were ready

    def chooser(self, seq: Sequence) -> Chooser:
        chooser = self._choosers.get(seq.seq_id)
        if chooser is None:
            value = DraftValue(CostModel())
            chooser = self._choosers[seq.seq_id] = Chooser(value, self._names)
            self._meters[seq.seq_id] = SelectiveDrafts(value)
        return chooser

    def proposed(
        self, seqs: list[Sequence], trees: list[DraftTree], num_draft_tokens: list[int], began: float, now: float
    ) -> None:
        self._began, self._proposed = began, now
        for seq, tree, k in zip(seqs, trees, num_draft_tokens):
            self._meters[seq.seq_id].cut([seq], [tree], [k])  # noted, and sent whole

    def observe(self, seqs: list[Sequence], results: list[StepResult], now: float) -> None:
        for seq, result in zip(seqs, results):
            count = result.tree.num_draft_tokens
            seconds = (self._proposed - self._began, now - self._proposed)
            timing = StepTiming(*seconds, 1 + len(result.tree), count, 1, int(count > 0))
            meter = self._meters.get(seq.seq_id)
            if meter is None:  # nothing was ever proposed for it
                continue
            meter.observe([seq], [result], timing, caught_up=False)
            meter.value.costs.observe(replace(timing, num_draft_tokens=0))
            self.chooser(seq).settle(1)

    def forget(self, seq: Sequence) -> None:
        self._choosers.pop(seq.seq_id, None)
        self._meters.pop(seq.seq_id, None)
