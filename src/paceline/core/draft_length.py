"""How many tokens to draft token next.

A draft length sees only what has already happened: the k of a step never depends on the draft tokens of that step. That is
what keeps the output exact (see `tests/core/test_budget.py` for the counterexample that breaks it).

fixed      the same k every step
adaptive   the k that has paid best lately, from acceptance by position and the cost of a pass by width.
           With costs that were really measured this is also the never-lose rule: k falls to 0 where guessing does not
           pay, and a probe now and then, paid from a small share of the time, finds out whether it pays again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paceline.config import checked_k
from paceline.core.cost_model import CostModel, StepTiming
from paceline.core.draft_tree import depths
from paceline.core.sequence import Sequence
from paceline.core.types import StepResult


class DraftLengthPolicy(Protocol):
    """Decides k before a step, learns after it."""

    def plan(self, seqs: list[Sequence]) -> list[int]:
        """k for each sequence of the next step."""

    def observe(self, seqs: list[Sequence], results: list[StepResult], timing: StepTiming) -> None:
        """What the step brought, and what it cost."""

    def forget(self, seq: Sequence) -> None:
        """The sequence is over."""


def within_room(seq: Sequence, k: int) -> int:
    """Never draft token past the end: a step writes at most k + 1 tokens. A sequence's own k goes before the draft length's."""
    wanted = k if seq.params.num_draft_tokens is None else seq.params.num_draft_tokens
    return max(0, min(wanted, seq.remaining_tokens - 1))


class FixedDraftLength:
    """The same k every step."""

    def __init__(self, k: int) -> None:
        self.k = checked_k(k)

    def plan(self, seqs: list[Sequence]) -> list[int]:
        return [within_room(seq, self.k) for seq in seqs]

    def observe(self, seqs: list[Sequence], results: list[StepResult], timing: StepTiming) -> None:
        pass

    def forget(self, seq: Sequence) -> None:
        pass


# --- acceptance -------------------------------------------------------------------------------------------------------


class PositionRates:
    """How often a draft token at each depth stands, given that all before it stood. Old steps fade."""

    def __init__(self, fade: float = 0.95, prior: float = 0.6, weight: float = 2.0) -> None:
        self.fade = fade
        self._prior, self._weight = prior, weight
        self._tried: list[float] = []
        self._stood: list[float] = []

    def observe(self, reach: int, accepted: int) -> None:
        """A step offered `reach` depths and `accepted` of them stood."""
        tried = min(reach, accepted + 1)  # the depth that failed was tried; those behind it were not
        while len(self._tried) < tried:
            self._tried.append(0.0)
            self._stood.append(0.0)
        # A depth that was not tried fades as well: it leans on its neighbour again, and so is tried again some day.
        for depth in range(len(self._tried)):
            self._tried[depth] = self._tried[depth] * self.fade + (1.0 if depth < tried else 0.0)
            self._stood[depth] = self._stood[depth] * self.fade + (1.0 if depth < accepted else 0.0)

    def ladder(self, size: int, others: list[float] | None = None) -> list[float]:
        """The rate at each of `size` depths. A depth seldom tried leans on `others`, or else on the depth before it."""
        found: list[float] = []
        before = self._prior
        for depth in range(size):
            prior = before if others is None else others[depth]
            if depth < len(self._tried):
                before = (self._stood[depth] + self._weight * prior) / (self._tried[depth] + self._weight)
            else:
                before = prior
            found.append(before)
        return found

    def at(self, depth: int) -> float:
        return self.ladder(depth + 1)[-1]

    def expected_tokens(self, k: int) -> float:
        """Tokens a step of k draft tokens writes: 1 + a_1 + a_1·a_2 + …"""
        total, product = 1.0, 1.0
        for rate in self.ladder(k):
            product *= rate
            total += product
        return total


# --- adaptive ---------------------------------------------------------------------------------------------------------


PREDICTED = "prediction"
EXPECTED, HOPED = 0.9, 0.55  # chance that a draft token stands before anything is known: of a prediction, of any other


@dataclass(slots=True)
class _TextState:
    rates: PositionRates
    kind: str  # how it is drafted for; see `_kind`
    known: int  # tokens that the draft had seen when it was last asked, or when the sequence began
    asked: int = 0  # draft tokens wanted in this step
    behind: int = 0  # tokens it had to catch up with in this step


@dataclass(slots=True)
class _Account:
    """What probing may still cost. Filled by a share of all time that passes, emptied by what probes lose."""

    seconds: float = 0.0
    price: float = 0.0  # what the last probe lost
    opened: bool = False


@dataclass(frozen=True, slots=True)
class _Choice:
    """A k for each sequence, and the tokens per second it promises."""

    ks: list[int]
    rate: float


class AdaptiveDraftLength:
    """The k that maximises tokens per second for the whole batch, from what was observed.

    Sequences are given draft tokens one at a time, each to whom it brings the most expected tokens, as long as the batch's
    tokens per second rises; so a hopeless sequence costs its neighbours nothing. Where nothing pays, one sequence now and then
    is probed with the k that would come nearest to paying. What probes lose is measured, and all of it together stays
    within PROBE_SHARE of the time. While guessing pays, a plain step now and then keeps its price known.
    """

    PROBE_SHARE = 0.006
    FIRST_PROBES = 1.5  # plain steps' worth of time that probes may lose at the very start
    MARGIN = 1.02  # guessing must promise at least this much over plain decoding
    LITTLE = 16  # tokens that a draft catches up with in passing
    HORIZON = 32  # steps within which guessing must earn what catching up costs
    PLAIN_EVERY = 64  # steps, times the gain: the more there is to win, the less an error about the price matters
    SHORTEST = 1e-9  # seconds: no step is quicker, whatever a clock says
    SHARPEST = 0.001  # gains below this many tokens are not worth looking at

    def __init__(self, costs: CostModel | None = None, largest: int = 16) -> None:
        self.costs = costs or CostModel()
        self.largest = checked_k(largest)
        self._overall: dict[str, PositionRates] = {}  # of all sequences of a kind
        self._texts: dict[int, _TextState] = {}
        self._depth_share = 1.0  # depths a draft token adds: 1 for a chain, less for a tree
        self._riders = 0.0  # nodes a guessing sequence sends along that cannot be accepted (lookahead's window)
        self._account = _Account()
        self._probing = False
        self._since_plain = 0
        self._resting: frozenset[int] = frozenset()  # sequences for which nothing pays, and the account allows no probe

    # --- before a step -----------------------------------------------------------------------------------------------

    def plan(self, seqs: list[Sequence]) -> list[int]:
        if self._resting and self._still_resting(seqs):
            return [0] * len(seqs)
        states = [self._state(seq) for seq in seqs]
        limits = [within_room(seq, self.largest) for seq in seqs]
        chosen = self._choose(seqs, states, limits)
        for seq, state, k in zip(seqs, states, chosen):
            state.asked, state.behind = k, 0
            if k:
                state.behind, state.known = len(seq.ids) - state.known, len(seq.ids)
        return chosen

    def _still_resting(self, seqs: list[Sequence]) -> bool:
        """A plain step that changes nothing costs nothing: no sums are done until there is a reason to."""
        if self._may_probe(len(seqs)) or any(seq.seq_id not in self._resting for seq in seqs):
            return False
        return all(seq.params.num_draft_tokens is None for seq in seqs)

    def _choose(self, seqs: list[Sequence], states: list[_TextState], limits: list[int]) -> list[int]:
        free = [index for index, seq in enumerate(seqs) if seq.params.num_draft_tokens is None]
        chosen = [0 if seq.params.num_draft_tokens is None else limit for seq, limit in zip(seqs, limits)]
        self._probing, self._resting = False, frozenset()
        if not any(limits[index] for index in free):
            return chosen
        nearest = self._best([states[index] for index in free], [limits[index] for index in free])
        plain = self.costs.of(len(free)).round(len(free))
        gain = nearest.rate * plain / len(free)
        behind = {index: len(seqs[index].ids) - states[index].known for index in free}
        debt = self.costs.catching_up(sum(behind[index] for index, k in zip(free, nearest.ks) if k))
        pays = gain > self.MARGIN and (gain - 1) * plain * self.HORIZON > debt
        self._since_plain += 1
        if pays and self._since_plain < self.PLAIN_EVERY * gain:
            for index, k in zip(free, nearest.ks):
                chosen[index] = k
            self._probe_one_left_out(behind, limits, chosen)
            return chosen
        self._since_plain = 0
        if not pays and self._may_probe(len(seqs)):
            asked = max((pair for pair in zip(free, nearest.ks) if pair[1]), key=lambda pair: behind[pair[0]])
            chosen[asked[0]] = asked[1]
            self._probing = True
        elif not pays:
            self._resting = frozenset(seqs[index].seq_id for index in free)
        return chosen

    def _probe_one_left_out(self, behind: dict[int, int], limits: list[int], chosen: list[int]) -> None:
        """Where guessing pays for some sequences, one that was given no draft token gets one when the account allows it.

        behind: of the sequences that may be given draft tokens, the tokens their draft has not seen.
        """
        left_out = [index for index in behind if not chosen[index] and limits[index]]
        if not left_out or not self._may_probe(len(chosen)):
            return
        nodes = len(chosen) + sum(chosen)
        costs = self.costs.of(len(chosen))
        asked = max(left_out, key=lambda index: behind[index])
        self._account.seconds -= costs.pass_of(nodes + 1) - costs.pass_of(nodes) + self.costs.catching_up(behind[asked])
        chosen[asked] = 1

    def _best(self, states: list[_TextState], limits: list[int]) -> _Choice:
        """Add the draft token that promises most, one by one; the best batch on the way that draft tokens at all."""
        ks, tokens, longest, asked, riders = [0] * len(states), float(len(states)), 0, 0, 0.0
        costs = self.costs.of(len(states))
        best = _Choice(list(ks), 0.0)
        for nodes, (gain, index) in enumerate(self._gains(states, limits), start=len(states) + 1):
            if not ks[index]:
                asked, riders = asked + 1, riders + self._riders
            ks[index] += 1
            longest = max(longest, ks[index])
            tokens += gain
            rate = tokens / max(costs.round(nodes + round(riders), longest, asked), self.SHORTEST)
            if rate > best.rate:
                best = _Choice(list(ks), rate)
        return best

    def _gains(self, states: list[_TextState], limits: list[int]) -> list[tuple[float, int]]:
        """Tokens that each further draft token for each sequence promises, most first. Of one sequence they only ever fall."""
        share, longest = self._depth_share, max(limits)
        overall = {kind: self._rates_of(kind).ladder(longest) for kind in {state.kind for state in states}}
        found: list[tuple[float, int]] = []
        for index, (state, limit) in enumerate(zip(states, limits)):
            ladder, reach, depth = state.rates.ladder(limit, overall[state.kind]), 1.0, -1
            for guess in range(limit):
                if int(guess * share + 0.5) > depth:
                    depth += 1
                    reach *= ladder[depth]
                if reach * share < self.SHARPEST and guess:
                    break
                found.append((reach * share, index))
        found.sort(key=lambda pair: -pair[0])  # stable: of equals, the earlier sequence and the earlier draft token
        return found

    def _may_probe(self, seqs: int) -> bool:
        account = self._account
        if not account.opened:
            account.opened = True
            account.seconds = self.FIRST_PROBES * self.costs.of(seqs).round(seqs)
        return account.seconds > 0 and account.seconds >= account.price

    # --- after a step ------------------------------------------------------------------------------------------------

    def observe(self, seqs: list[Sequence], results: list[StepResult], timing: StepTiming) -> None:
        states = [self._state(seq) for seq in seqs]
        late = sum(state.behind for state in states if state.asked and state.behind > self.LITTLE)
        self.costs.observe(timing, caught_up=late)
        self._settle(timing, sum(len(result.emitted) for result in results))
        if not timing.num_draft_tokens:
            return
        for state, result in zip(states, results):
            draft_tokens = result.tree.num_draft_tokens
            if draft_tokens:
                self._riders += (result.tree.probes - self._riders) * (0.1 if self._riders else 1.0)
                reach = max(depths(result.tree.parents[:draft_tokens])) + 1
                self._depth_share += 0.1 * (reach / draft_tokens - self._depth_share)
                stood = len(result.verified.accepted)  # also what an end cut off was judged
                state.rates.observe(reach, stood)
                self._rates_of(state.kind).observe(reach, stood)

    def _settle(self, timing: StepTiming, emitted: int) -> None:
        """Keep the account. A probe's loss is all that it cost beyond the plain time of what it wrote."""
        account, plain = self._account, self.costs.of(timing.num_seqs).round(timing.num_seqs)
        account.seconds += self.PROBE_SHARE * timing.seconds
        if self._probing and timing.num_draft_tokens:
            account.price = max(0.0, timing.seconds - plain * emitted / timing.num_seqs)
            account.seconds -= account.price
        account.seconds = min(account.seconds, max(2 * account.price, self.FIRST_PROBES * plain))

    def forget(self, seq: Sequence) -> None:
        self._texts.pop(seq.seq_id, None)

    def _state(self, seq: Sequence) -> _TextState:
        state = self._texts.get(seq.seq_id)
        if state is None:
            rates = PositionRates(fade=0.97, weight=6.0)
            state = self._texts[seq.seq_id] = _TextState(rates, _kind(seq), seq.num_cached_tokens)
        return state

    def _rates_of(self, kind: str) -> PositionRates:
        """How draft tokens of a kind fare. A client that brings a prediction has reason to expect that it holds."""
        rates = self._overall.get(kind)
        if rates is None:
            prior = EXPECTED if kind == PREDICTED else HOPED
            rates = self._overall[kind] = PositionRates(fade=0.995, prior=prior, weight=3.0)
        return rates


def _kind(seq: Sequence) -> str:
    """Sequences that are drafted for in one way learn from each other: those of a method, those with a prediction."""
    return seq.params.method or (PREDICTED if seq.params.prediction else "")
