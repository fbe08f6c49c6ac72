"""How many tokens to draft next.

A draft-length policy sees only what has already happened: whether a draft token is sent never depends on what was drawn
for it, or after it. That is what keeps the output exact (tests/core/test_draft_length.py has the counterexample that
breaks it).

fixed      the same k every step
adaptive   the k that has paid best lately, from acceptance by position and the cost of a pass by width.
           With measured costs this is also the never-lose rule: k falls to 0 where drafting does not pay, and a probe
           now and then, paid from a small share of the time, finds out whether it pays again.
           Drafts that state their confidence are cut to what pays after they were made (selective.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from paceline.config import checked_k
from paceline.core.acceptance import PositionRates, expected_tokens
from paceline.core.cost_model import CostModel, StepTiming
from paceline.core.draft_choice import Choice, DraftCandidates, DraftedSequence, DraftLimits, Gain, KeptChoice
from paceline.core.draft_tree import DraftTree, depths
from paceline.core.draft_value import PREDICTION, DraftValue, kind_of
from paceline.core.probing import ProbeSchedule
from paceline.core.selective import SelectiveDrafts, Unread
from paceline.core.sequence import Sequence
from paceline.core.types import StepResult


class DraftLengthPolicy(Protocol):
    """Decides k before a step, learns after it."""

    @property
    def is_probing(self) -> bool:
        """Whether the last plan only finds something out: few steps of it are enough."""
        return False

    def plan(self, seqs: list[Sequence]) -> list[int]:
        """k for each sequence of the next step."""

    def cut(self, seqs: list[Sequence], trees: list[DraftTree]) -> list[DraftTree]:
        """What is sent of the drafts that were made for the last plan."""
        return trees

    def sent(self, seqs: list[Sequence], trees: list[DraftTree]) -> None:
        """Drafts for the last plan that could not be cut: steps in a row send them as they were made."""
        return

    def draft_value(self) -> DraftValue | None:
        """What drafts are worth, for drafters that choose among several or stop by it; None: it does not measure."""
        return None

    def observe(self, seqs: list[Sequence], results: list[StepResult], timing: StepTiming) -> None:
        """What the step accepted, and what it cost."""

    def stays_plain(self, seqs: list[Sequence]) -> bool:
        """Whether none of these sequences will ever have a draft token: they may take many plain steps at once."""
        return all(seq.params.num_draft_tokens == 0 for seq in seqs)

    def forget(self, seq: Sequence) -> None:
        """The sequence is over."""
        return

    def rehearsed(self, timings: list[StepTiming]) -> None:
        """What steps of made-up sequences took before the first real one."""
        return


def within_room(seq: Sequence, k: int) -> int:
    """Never draft past the end: a step emits at most k + 1 tokens. A sequence's own k goes before the policy's."""
    limit = k if seq.params.num_draft_tokens is None else seq.params.num_draft_tokens
    return max(0, min(limit, seq.remaining_tokens - 1))


class FixedDraftLength(DraftLengthPolicy):
    """The same k every step."""

    def __init__(self, k: int) -> None:
        self.k = checked_k(k)

    def plan(self, seqs: list[Sequence]) -> list[int]:
        return [within_room(seq, self.k) for seq in seqs]

    def stays_plain(self, seqs: list[Sequence]) -> bool:
        return all(
            (self.k if seq.params.num_draft_tokens is None else seq.params.num_draft_tokens) == 0 for seq in seqs
        )

    def observe(self, seqs: list[Sequence], results: list[StepResult], timing: StepTiming) -> None:
        pass


# --- adaptive ---------------------------------------------------------------------------------------------------------


PREDICTION_PRIOR, PRIOR = 0.9, 0.55  # acceptance before any observation: of a client's prediction, of other drafts


class AdaptiveDraftLength(DraftLengthPolicy):
    """The k that maximises tokens per second for the whole batch, from what was observed.

    Draft tokens are given out one at a time, each to the sequence where it brings the most expected tokens, as long as
    the batch's tokens per second rise; so a hopeless sequence costs its neighbours nothing. Where nothing pays, one
    sequence now and then is probed with the k that comes nearest to paying: probing.py decides when. While drafting
    pays, a plain step now and then keeps its cost up to date.
    """

    MARGIN = 1.02  # drafting must promise at least this much over plain decoding
    FEW_UNREAD = 16  # tokens that a drafter reads in passing
    HORIZON = 64  # steps within which drafting must earn what catching up costs
    PLAIN_EVERY = 64  # steps, times the gain: the larger the gain, the less an error of the plain cost matters
    MIN_SECONDS = 1e-9  # no step is quicker, whatever a clock says
    MIN_GAIN = 0.001  # tokens: smaller gains are not considered
    MAX_LOSS = 2.0  # times the expected seconds that a probe is charged for: more is a hiccup of the machine

    def __init__(
        self, costs: CostModel | None = None, max_draft_tokens: int = 16, rows_rounded_alike: int | None = None
    ) -> None:
        """rows_rounded_alike: as that of the target."""
        self.costs = costs or CostModel()
        self._selective = SelectiveDrafts(DraftValue(self.costs))
        self._limits = DraftLimits(checked_k(max_draft_tokens), rows_rounded_alike)
        self._overall: dict[str, PositionRates] = {}  # of all sequences of a kind
        self._states: dict[int, DraftedSequence] = {}
        self._depth_share = 1.0  # depths a draft token adds: 1 for a chain, less for a tree
        self._probe_nodes = 0.0  # nodes a drafting sequence adds that cannot be accepted (lookahead's window)
        self._schedule = ProbeSchedule()
        self._is_probe, self._steps_since_plain = False, 0  # is_probe: the step that is under way
        self._kept: KeptChoice | None = None
        self._resting: frozenset[int] = frozenset()  # sequences for which nothing pays while no probe is due

    # --- before a step ------------------------------------------------------------------------------------------------

    def plan(self, seqs: list[Sequence]) -> list[int]:
        if self._resting and self._still_resting(seqs):
            return [0] * len(seqs)
        states = [self._state(seq) for seq in seqs]
        limits = [within_room(seq, self._limits.of_each(len(seqs))) for seq in seqs]
        ks = self._choose(seqs, states, limits)
        for seq, state, k in zip(seqs, states, ks):
            state.num_draft_tokens, state.num_unread = k, len(seq.ids) - state.num_read if k else 0
        return ks

    def _still_resting(self, seqs: list[Sequence]) -> bool:
        """A plain step that changes nothing costs nothing: no sums until there is a reason for them."""
        schedule = self._schedule
        cost = schedule.cost + self.costs.catching_up(schedule.rested)
        if self._is_due(cost, self.costs.plain_pass(len(seqs))):
            return False
        if any(seq.seq_id not in self._resting for seq in seqs):
            return False
        return all(seq.params.num_draft_tokens is None for seq in seqs)

    def _choose(self, seqs: list[Sequence], states: list[DraftedSequence], limits: list[int]) -> list[int]:
        ks = [0 if seq.params.num_draft_tokens is None else limit for seq, limit in zip(seqs, limits)]
        indices = self._ask(seqs, states, limits, ks)
        self._is_probe, self._resting = False, frozenset()
        if not any(limits[index] for index in indices):
            return ks
        num_unread = {index: len(seqs[index].ids) - states[index].num_read for index in indices}
        candidates = DraftCandidates(indices, limits, num_unread, self.costs.plain_pass(len(indices)))
        self._schedule.open(candidates.plain, self.costs.catching_up(max(num_unread.values())))
        best = self._best([states[index] for index in indices], [limits[index] for index in indices])
        gain = best.rate * candidates.plain / candidates.count
        pays = self._pays(gain, best, candidates)
        self._steps_since_plain += 1
        if pays and self._steps_since_plain < self.PLAIN_EVERY * gain:
            self._draft(best, candidates, ks)
            return ks
        self._steps_since_plain = 0
        if not pays:
            self._kept = None  # a probe is timed by what is known now
            self._probe_or_rest(seqs, best, candidates, ks)
        return ks

    def _ask(self, seqs: list[Sequence], states: list[DraftedSequence], limits: list[int], ks: list[int]) -> list[int]:
        """Set the ks of sequences whose drafts are cut later; returns the others whose k is to be chosen."""
        indices: list[int] = []
        self._selective.begin_step()
        unread = [self._much_unread(seq, state) for seq, state in zip(seqs, states)]
        of_all = sum(unread)
        for index, seq in enumerate(seqs):
            if seq.params.num_draft_tokens is not None:
                continue
            if not self._selective.covers(seq):
                indices.append(index)
            elif limits[index]:
                ks[index] = self._selective.ask(seq, limits[index], Unread(unread[index], of_all), len(seqs))
        return indices

    def _much_unread(self, seq: Sequence, state: DraftedSequence) -> int:
        """Tokens that the drafter has not read; 0 if it reads them in passing."""
        count = len(seq.ids) - state.num_read
        return count if count > self.FEW_UNREAD else 0

    @property
    def is_probing(self) -> bool:
        return self._is_probe

    def draft_value(self) -> DraftValue:
        return self._selective.value

    def sent(self, seqs: list[Sequence], trees: list[DraftTree]) -> None:
        self._selective.sent(seqs, trees, [self._state(seq).num_draft_tokens for seq in seqs])

    def cut(self, seqs: list[Sequence], trees: list[DraftTree]) -> list[DraftTree]:
        return self._selective.cut(seqs, trees, [self._state(seq).num_draft_tokens for seq in seqs])

    def _pays(self, gain: float, best: Choice, candidates: DraftCandidates) -> bool:
        """Whether drafting beats plain decoding, and soon earns what the drafter must read first."""
        unread = sum(candidates.num_unread[index] for index, k in zip(candidates.indices, best.ks) if k)
        return gain > self.MARGIN and (gain - 1) * candidates.plain * self.HORIZON > self.costs.catching_up(unread)

    def _draft(self, best: Choice, candidates: DraftCandidates, ks: list[int]) -> None:
        for index, k in zip(candidates.indices, best.ks):
            ks[index] = k
        self._probe_an_omitted_sequence(candidates, ks)

    def _probe_or_rest(self, seqs: list[Sequence], best: Choice, candidates: DraftCandidates, ks: list[int]) -> None:
        """Probe the sequence that the drafter has read least of, or plan no sums for these sequences for a while."""
        drafting = {index: k for index, k in zip(candidates.indices, best.ks) if k}
        probe = max(drafting, key=candidates.num_unread.__getitem__)
        lost = best.seconds - candidates.plain * best.tokens / candidates.count
        schedule = self._schedule
        schedule.reading = self.costs.catching_up(candidates.num_unread[probe])
        schedule.cost = max(0.0, lost) + schedule.reading
        if self._is_due(schedule.cost, candidates.plain):
            ks[probe] = drafting[probe]
            self._is_probe = True
        else:
            self._resting = frozenset(seqs[index].seq_id for index in candidates.indices)

    def _is_due(self, cost: float, plain: float) -> bool:
        return self._schedule.is_due(cost, plain, sure=self.costs.draft.is_confirmed)

    def _probe_an_omitted_sequence(self, candidates: DraftCandidates, ks: list[int]) -> None:
        """Where drafting pays for some sequences, one that got no draft token gets one when the account allows it."""
        omitted = [index for index in candidates.indices if not ks[index] and candidates.limits[index]]
        if not omitted:
            return
        nodes, costs = len(ks) + sum(ks), self.costs.of(len(ks))
        probe = max(omitted, key=candidates.num_unread.__getitem__)
        added = costs.pass_of(nodes + 1) - costs.pass_of(nodes)
        cost = added + self.costs.catching_up(candidates.num_unread[probe])
        if self._is_due(cost, candidates.plain):
            self._schedule.balance -= cost
            ks[probe] = 1

    def _best(self, states: list[DraftedSequence], limits: list[int]) -> Choice:
        """The choice with draft tokens that promises the most tokens a second."""
        best = None if self._kept is None else self._kept.take(states, limits)
        if best is None:
            best = self._best_alone(states[0], limits[0]) if len(states) == 1 else self._best_together(states, limits)
            self._kept = KeptChoice(best, states, limits)
        return best

    def _best_together(self, states: list[DraftedSequence], limits: list[int]) -> Choice:
        """Add the draft token that promises most, one by one; the best batch with draft tokens on the way."""
        ks, tokens, longest, drafting, probes = [0] * len(states), float(len(states)), 0, 0, 0.0
        costs = self.costs.of(len(states))
        best = Choice(list(ks))
        for nodes, gain in enumerate(self._gains(states, limits), start=len(states) + 1):
            if not ks[gain.index]:
                drafting, probes = drafting + 1, probes + self._probe_nodes
            ks[gain.index] += 1
            longest = max(longest, ks[gain.index])
            tokens += gain.tokens
            seconds = max(costs.step(nodes + round(probes), longest, drafting), self.MIN_SECONDS)
            if tokens / seconds > best.rate:
                best = Choice(list(ks), tokens, seconds)
        return best

    def _best_alone(self, state: DraftedSequence, limit: int) -> Choice:
        """The same for one sequence, whose draft tokens come in one order. Planned before every step: it is quick."""
        rates = state.rates.rates(limit, self._rates_of(state.kind).rates(limit))
        costs, probes = self.costs.of(1), 1 + round(self._probe_nodes)
        best_k, best_tokens, best_seconds, tokens = 0, 0.0, 1.0, 1.0
        for k, gain in enumerate(self._gains_of(rates), start=1):
            tokens += gain
            seconds = max(costs.step(k + probes, k, 1), self.MIN_SECONDS)
            if tokens * best_seconds > best_tokens * seconds:
                best_k, best_tokens, best_seconds = k, tokens, seconds
        return Choice([best_k], best_tokens, best_seconds)

    def _gains(self, states: list[DraftedSequence], limits: list[int]) -> list[Gain]:
        """What each further draft token for each sequence promises, most first. Those of one sequence only fall."""
        longest = max(limits)
        overall = {kind: self._rates_of(kind).rates(longest) for kind in {state.kind for state in states}}
        gains: list[Gain] = []
        for index, (state, limit) in enumerate(zip(states, limits)):
            rates = state.rates.rates(limit, overall[state.kind])
            gains += [Gain(tokens, index) for tokens in self._gains_of(rates)]
        gains.sort(key=lambda gain: -gain.tokens)  # stable: of equals, the earlier sequence and the earlier draft token
        return gains

    def _gains_of(self, rates: list[float]) -> list[float]:
        """Tokens that each further draft token promises, by the rates of their depths."""
        share, reach, depth = self._depth_share, 1.0, -1
        gains: list[float] = []
        for node in range(len(rates)):
            if int(node * share + 0.5) > depth:
                depth += 1
                reach *= rates[depth]
            if reach * share < self.MIN_GAIN and node:
                break
            gains.append(reach * share)
        return gains

    # --- after a step -------------------------------------------------------------------------------------------------

    def observe(self, seqs: list[Sequence], results: list[StepResult], timing: StepTiming) -> None:
        """A step in which anything was compiled or captured teaches acceptance and no cost."""
        states = [self._state(seq) for seq in seqs]
        caught_up = self._caught_up(states)
        num_selected = self._selective.observe(seqs, results, self._apart(timing), caught_up=caught_up)
        if timing.num_draft_tokens or num_selected:
            for seq, state, result in zip(seqs, states, results):
                self._observe_result(seq, state, result)
        if not timing.clean:
            return
        if num_selected < len(seqs):
            self._settle(states, timing, sum(len(result.emitted) for result in results))
        if timing.looped and timing.num_draft_tokens and any(map(self._selective.covers, seqs)):
            return  # also where a later plan asks for nothing: draft and pass took this time together
        # What drafts cost that are cut afterwards does not follow from what is sent of them: selective.py learns it.
        if num_selected and timing.num_draft_tokens and not caught_up:
            timing = replace(timing, num_draft_tokens=0)
        self.costs.observe(timing, caught_up=caught_up)

    def _apart(self, timing: StepTiming) -> StepTiming:
        """Drafting and verifying of a step that were timed as one: what a pass alone does not cost is drafting."""
        if not timing.looped:
            return timing
        verify = min(timing.verify_seconds, self.costs.of(timing.num_seqs).pass_of(timing.nodes))
        return replace(timing, draft_seconds=timing.verify_seconds - verify, verify_seconds=verify)

    def _caught_up(self, states: list[DraftedSequence]) -> int:
        return sum(state.num_unread for state in states if state.num_unread > self.FEW_UNREAD)

    def _observe_result(self, seq: Sequence, state: DraftedSequence, result: StepResult) -> None:
        if state.num_draft_tokens:
            state.num_read, state.num_unread = len(seq.ids), 0  # of several steps in a row only the first catches up
        count = result.tree.num_draft_tokens
        if not count or self._selective.covers(seq):
            return
        self._kept = None
        self._probe_nodes += (result.tree.probes - self._probe_nodes) * (0.1 if self._probe_nodes else 1.0)
        reach = max(depths(result.tree.parents[:count])) + 1
        self._depth_share += 0.1 * (reach / count - self._depth_share)
        accepted = len(result.verified.accepted)  # draft tokens that an end cut off were verified too
        state.rates.observe(reach, accepted)
        self._rates_of(state.kind).observe(reach, accepted)

    def _settle(self, states: list[DraftedSequence], timing: StepTiming, emitted: int) -> None:
        """Keep the probe account: a draft wins the plain time of its tokens, less what it took.

        Tokens count half as they came and half as they are to be expected: luck must not end a probe.
        """
        plain = self.costs.plain_pass(timing.num_seqs)
        if not timing.num_draft_tokens:
            self._schedule.passed(min(timing.seconds, self.MAX_LOSS * plain), plain)
            return
        expected = self.costs.of(timing.num_seqs).step(timing.nodes, timing.num_draft_tokens, timing.num_drafting)
        expected += self.costs.catching_up(self._caught_up(states))
        seconds = min(timing.seconds, self.MAX_LOSS * max(expected, plain))
        tokens = (emitted + sum(self._expected_tokens(state) for state in states)) / 2
        self._schedule.drafted(plain * tokens / timing.num_seqs - seconds, plain, probe=self._is_probe)

    def _expected_tokens(self, state: DraftedSequence) -> float:
        k = state.num_draft_tokens
        return expected_tokens(state.rates.rates(k, self._rates_of(state.kind).rates(k)))

    def forget(self, seq: Sequence) -> None:
        self._states.pop(seq.seq_id, None)

    def rehearsed(self, timings: list[StepTiming]) -> None:
        self.costs.adopt(timings)

    def _state(self, seq: Sequence) -> DraftedSequence:
        state = self._states.get(seq.seq_id)
        if state is None:
            rates = PositionRates(fade=0.97, weight=6.0)
            state = self._states[seq.seq_id] = DraftedSequence(rates, kind_of(seq), seq.num_cached_tokens)
        return state

    def _rates_of(self, kind: str) -> PositionRates:
        """Acceptance of one kind of draft. A client that sends a prediction has reason to expect that it holds."""
        rates = self._overall.get(kind)
        if rates is None:
            prior = PREDICTION_PRIOR if kind == PREDICTION else PRIOR
            rates = self._overall[kind] = PositionRates(fade=0.995, prior=prior, weight=3.0)
        return rates
