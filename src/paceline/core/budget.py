"""How many tokens to guess next.

A budget sees only what has already happened: the k of a round never depends on the guesses of that round. That is
what keeps the output exact (see `tests/core/test_budget.py` for the counterexample that breaks it).

fixed      the same k every round
adaptive   the k that has paid best lately, from acceptance by position and the cost of a pass by width.
           With costs that were really measured this is also the never-lose rule: k falls to 0 where guessing does not
           pay, and a probe now and then, paid from a small share of the time, finds out whether it pays again.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.protocols import Round
from paceline.core.sequence import Sequence
from paceline.core.tree import depths
from paceline.options import checked_k


@dataclass(frozen=True, slots=True)
class Timing:
    """What one round cost. nodes: tokens read by the target in the pass; guesses: the most drafted for one text."""

    draft_seconds: float
    verify_seconds: float
    nodes: int
    guesses: int
    texts: int

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds


class Budget(Protocol):
    """Decides k before a round, learns after it."""

    def plan(self, texts: list[Sequence]) -> list[int]:
        """k for each text of the next round."""

    def observe(self, texts: list[Sequence], rounds: list[Round], timing: Timing) -> None:
        """What the round brought, and what it cost."""

    def forget(self, text: Sequence) -> None:
        """The text is over."""


def within_room(text: Sequence, k: int) -> int:
    """Never guess past the end: a round writes at most k + 1 tokens. A text's own k goes before the budget's."""
    wanted = k if text.draft_tokens is None else text.draft_tokens
    return max(0, min(wanted, text.room - 1))


class FixedBudget:
    """The same k every round."""

    def __init__(self, k: int) -> None:
        self.k = checked_k(k)

    def plan(self, texts: list[Sequence]) -> list[int]:
        return [within_room(text, self.k) for text in texts]

    def observe(self, texts: list[Sequence], rounds: list[Round], timing: Timing) -> None:
        pass

    def forget(self, text: Sequence) -> None:
        pass


# --- costs ------------------------------------------------------------------------------------------------------------


SHORTEST = 1e-9  # seconds: no round is quicker, whatever a clock says


class CostCurve:
    """Seconds by size (tokens in a pass, guesses in a round): straight lines between what was seen, smoothed over time.

    The longer a size was not seen, the more a new sample of it counts: texts grow and machines get busy. What was lent
    by another curve has the right shape at best: a sample of one's own rescales all of it.
    """

    WEIGHT = 0.2  # of a sample that follows another one
    MEMORY = 32  # samples of other sizes after which an old value counts half
    FAR = 4.0  # times what was known: a hiccup of the machine, not the price of a pass …
    PATIENCE = 2  # … unless it happens more often than this in a row
    RESCALED = 8.0  # at most, by one sample

    def __init__(self, seen: dict[int, float] | None = None, unknown: float = 1.0) -> None:
        self._seen = dict(sorted((seen or {}).items()))
        self._unknown = unknown
        self._count = self._doubted = 0
        self._when = dict.fromkeys(self._seen, -self.MEMORY // 2)  # a first measurement is not the last word
        self._known: list[int] = list(self._seen)
        self._answers: dict[int, float] = {}  # asked many times between two samples
        self._borrowed: set[int] = set()

    def add(self, size: int, seconds: float) -> None:
        if self._borrowed:
            self._rescale(size, seconds)
        before = self._seen.get(size)
        if before and seconds > self.FAR * before and self._doubted < self.PATIENCE:
            self._doubted += 1
            return
        self._doubted, self._count = 0, self._count + 1
        if before:
            age = self._count - self._when[size]
            weight = max(self.WEIGHT, age / (age + self.MEMORY))
            seconds = before + weight * (min(seconds, 2 * before) - before)
        self._seen[size], self._when[size] = seconds, self._count
        self._known = sorted(self._seen) if before is None else self._known
        self._answers.clear()

    def _rescale(self, size: int, seconds: float) -> None:
        """The first sample of a size tells how far the rest of what was borrowed is off."""
        believed = self.at(size)
        if size in self._borrowed or size not in self._seen:
            ratio = seconds / believed if believed > 0 else 1.0
            ratio = min(max(ratio, 1 / self.RESCALED), self.RESCALED)
            for other in self._borrowed:
                self._seen[other] *= ratio
            self._borrowed.discard(size)
            self._answers.clear()

    def at(self, size: int) -> float:
        answer = self._answers.get(size)
        if answer is None:
            answer = self._answers[size] = self._between(size)
        return answer

    def _between(self, size: int) -> float:
        known = self._known
        if not known:
            return self._unknown
        right = bisect_left(known, size)
        if right < len(known) and known[right] == size:
            return self._seen[size]
        if right == 0:
            return self._seen[known[0]]
        low = known[right - 1]
        if right == len(known):
            return self._seen[low] + self._slope_beyond() * (size - low)
        return self._seen[low] + self._slope(low, known[right]) * (size - low)

    def _slope_beyond(self) -> float:
        """Beyond what was seen, cost can only be assumed to go on growing: the cautious guess."""
        last = self._known[-1]
        if len(self._known) == 1:
            return self._seen[last] / last if last else 0.0
        return max(0.0, self._slope(self._known[-2], last))

    def _slope(self, low: int, high: int) -> float:
        return (self._seen[high] - self._seen[low]) / (high - low)

    def copy(self) -> CostCurve:
        return CostCurve(self._seen, self._unknown)

    def lent(self) -> CostCurve:
        """A curve to begin with where nothing was measured yet."""
        twin = self.copy()
        twin._borrowed = set(twin._seen)
        return twin

    @property
    def sizes(self) -> list[int]:
        """What was seen, in rising order."""
        return self._known

    def as_dict(self) -> dict[int, float]:
        return {size: self._seen[size] for size in self._known}


def no_guesses_are_free() -> CostCurve:
    """The draft's curve before anything was measured: 0 guesses cost nothing, and so do others until they are tried."""
    return CostCurve({0: 0.0}, unknown=0.0)


@dataclass(slots=True)
class Costs:
    """What a round costs: the target's pass by the tokens in it, and the draft by its number of guesses.

    A pass over one token of eight texts is not a pass over eight tokens of one, so a batch learns on its own what a
    plain pass costs it. What guesses add is read off the curve of one text, stretched by what they really added lately:
    batch sizes change all the time, and each would have to be tried at every width before it knew anything for itself.
    """

    verify: CostCurve = field(default_factory=CostCurve)
    draft: CostCurve = field(default_factory=no_guesses_are_free)
    grain: int = 1  # tokens a kernel takes at a time: beyond it, only whole grains differ in price
    plain: CostCurve = field(default_factory=CostCurve)  # by texts in a batch
    drafts: dict[int, CostCurve] = field(default_factory=dict)  # by texts in a batch
    stretch: float = 1.0

    @classmethod
    def known(cls, pass_seconds: dict[int, float], draft_seconds: dict[int, float], grain: int = 1) -> Costs:
        """From seconds that were measured earlier, by tokens in a pass and by guesses in a round."""
        return cls(CostCurve(pass_seconds), CostCurve({0: 0.0, **draft_seconds}, unknown=0.0), grain)

    def of(self, texts: int) -> BatchCosts:
        """The costs of a batch of so many texts."""
        return BatchCosts(self, max(1, texts))

    def observe(self, timing: Timing, *, steady: bool = True) -> None:
        """Learn from one round. Not `steady`: the draft had much to catch up with, which no next round will cost."""
        if timing.texts <= 1:
            self.verify.add(self.whole(timing.nodes), timing.verify_seconds)
        elif timing.nodes == timing.texts:
            self.plain.add(timing.texts, timing.verify_seconds)
        else:
            self._stretch(timing)
        if timing.guesses and steady:
            self.draft_of(timing.texts).add(timing.guesses, timing.draft_seconds)

    def _stretch(self, timing: Timing) -> None:
        added = self.width(timing.nodes) - self.width(timing.texts)
        if added > 0:
            seen = (timing.verify_seconds - self.of(timing.texts).pass_of(timing.texts)) / added
            self.stretch += STRETCH_WEIGHT * (min(max(seen, LEAST_STRETCH), MOST_STRETCH) - self.stretch)

    def plain_of(self, texts: int) -> float:
        """A plain pass of a batch; of a size never seen, what the nearest one pays and the difference in width."""
        nearest = min((1, *self.plain.sizes), key=lambda size: abs(size - texts))
        known = self.width(1) if nearest == 1 else self.plain.at(nearest)
        return known + self.width(texts) - self.width(nearest)

    def draft_of(self, texts: int) -> CostCurve:
        if texts <= 1:
            return self.draft
        known = self.drafts.get(texts)
        if known is None:
            nearest = min((1, *self.drafts), key=lambda size: abs(size - texts))
            known = self.drafts[texts] = self.draft_of(nearest).lent()
        return known

    def width(self, nodes: int) -> float:
        """A pass over so many tokens of one text."""
        return self.verify.at(self.whole(nodes))

    def whole(self, nodes: int) -> int:
        return nodes if nodes <= self.grain else -(-nodes // self.grain) * self.grain


STRETCH_WEIGHT, LEAST_STRETCH, MOST_STRETCH = 0.1, 0.5, 8.0


@dataclass(frozen=True, slots=True)
class BatchCosts:
    """What a round of `texts` texts costs."""

    costs: Costs
    texts: int

    def pass_of(self, nodes: int) -> float:
        costs = self.costs
        if self.texts == 1:
            return costs.width(nodes)
        return costs.plain_of(self.texts) + costs.stretch * (costs.width(nodes) - costs.width(self.texts))

    def round(self, nodes: int, guesses: int) -> float:
        return self.pass_of(nodes) + (self.costs.draft_of(self.texts).at(guesses) if guesses else 0.0)


# --- acceptance -------------------------------------------------------------------------------------------------------


class PositionRates:
    """How often a guess at each depth stands, given that all before it stood. Old rounds fade."""

    def __init__(self, fade: float = 0.95, prior: float = 0.6, weight: float = 2.0) -> None:
        self.fade = fade
        self._prior, self._weight = prior, weight
        self._tried: list[float] = []
        self._stood: list[float] = []

    def observe(self, reach: int, accepted: int) -> None:
        """A round offered `reach` depths and `accepted` of them stood."""
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
        """Tokens a round of k guesses writes: 1 + a_1 + a_1·a_2 + …"""
        total, product = 1.0, 1.0
        for rate in self.ladder(k):
            product *= rate
            total += product
        return total


# --- adaptive ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _TextState:
    rates: PositionRates
    kind: str  # how it is drafted for; see `_kind`
    asked: int = 0  # guesses wanted in this round
    behind: int = 0  # rounds without a guess before this one: what the draft has to catch up with
    idle: int = 0  # rounds planned since it was last asked


@dataclass(slots=True)
class _Account:
    """What probing may still cost. Filled by a share of all time that passes, emptied by what probes lose."""

    seconds: float = 0.0
    price: float = 0.0  # what the last probe lost
    opened: bool = False


@dataclass(frozen=True, slots=True)
class _Choice:
    """A k for each text, and the tokens per second it promises."""

    ks: list[int]
    rate: float


class AdaptiveBudget:
    """The k that maximises tokens per second for the whole batch, from what was observed.

    Texts are given guesses one at a time, each to whom it brings the most expected tokens, as long as the batch's
    tokens per second rises; so a hopeless text costs its neighbours nothing. Where nothing pays, one text now and then
    is probed with the k that would come nearest to paying. What probes lose is measured, and all of it together stays
    within PROBE_SHARE of the time. While guessing pays, a plain round now and then keeps its price known.
    """

    PROBE_SHARE = 0.012
    FIRST_PROBES = 1.5  # plain rounds' worth of time that probes may lose at the very start
    MARGIN = 1.02  # guessing must promise at least this much over plain decoding
    SOON = 4  # rounds without a guess after which catching up still costs little
    PLAIN_EVERY = 64  # rounds, times the gain: the more there is to win, the less an error about the price matters
    SHARPEST = 0.001  # gains below this many tokens are not worth looking at

    def __init__(self, costs: Costs | None = None, largest: int = 16) -> None:
        self.costs = costs or Costs()
        self.largest = checked_k(largest)
        self._overall: dict[str, PositionRates] = {}  # of all texts of a kind
        self._texts: dict[int, _TextState] = {}
        self._depth_share = 1.0  # depths a guess adds: 1 for a chain, less for a tree
        self._riders = 0.0  # nodes a guessing text sends along that cannot be accepted (lookahead's window)
        self._account = _Account()
        self._probing = False
        self._since_plain = 0
        self._resting: frozenset[int] = frozenset()  # texts for which nothing pays, and the account allows no probe

    # --- before a round -----------------------------------------------------------------------------------------------

    def plan(self, texts: list[Sequence]) -> list[int]:
        if self._resting and self._still_resting(texts):
            return [0] * len(texts)
        states = [self._state(text) for text in texts]
        limits = [within_room(text, self.largest) for text in texts]
        chosen = self._choose(texts, states, limits)
        for state, k in zip(states, chosen):
            state.behind, state.asked = state.idle, k
            state.idle = 0 if k else state.idle + 1
        return chosen

    def _still_resting(self, texts: list[Sequence]) -> bool:
        """A plain round that changes nothing costs nothing: no sums are done until there is a reason to."""
        if self._may_probe(len(texts)) or any(text.number not in self._resting for text in texts):
            return False
        return all(text.draft_tokens is None for text in texts)

    def _choose(self, texts: list[Sequence], states: list[_TextState], limits: list[int]) -> list[int]:
        free = [index for index, text in enumerate(texts) if text.draft_tokens is None]
        chosen = [0 if text.draft_tokens is None else limit for text, limit in zip(texts, limits)]
        self._probing, self._resting = False, frozenset()
        if not any(limits[index] for index in free):
            return chosen
        nearest = self._best([states[index] for index in free], [limits[index] for index in free])
        gain = nearest.rate * self.costs.of(len(free)).round(len(free), 0) / len(free)
        pays = gain > self.MARGIN
        self._since_plain += 1
        if pays and self._since_plain < self.PLAIN_EVERY * gain:
            for index, k in zip(free, nearest.ks):
                chosen[index] = k
            self._probe_one_left_out(states, limits, free, chosen)
            return chosen
        self._since_plain = 0
        if not pays and self._may_probe(len(texts)):
            asked = max((pair for pair in zip(free, nearest.ks) if pair[1]), key=lambda pair: states[pair[0]].idle)
            chosen[asked[0]] = asked[1]
            self._probing = True
        elif not pays:
            self._resting = frozenset(texts[index].number for index in free)
        return chosen

    def _probe_one_left_out(
        self, states: list[_TextState], limits: list[int], free: list[int], chosen: list[int]
    ) -> None:
        """Where guessing pays for some texts, one that was given no guess gets one when the account allows it."""
        left_out = [index for index in free if not chosen[index] and limits[index]]
        if not left_out or not self._may_probe(len(states)):
            return
        nodes = len(states) + sum(chosen)
        costs = self.costs.of(len(states))
        self._account.seconds -= costs.pass_of(nodes + 1) - costs.pass_of(nodes)
        chosen[max(left_out, key=lambda index: states[index].idle)] = 1

    def _best(self, states: list[_TextState], limits: list[int]) -> _Choice:
        """Add the guess that promises most, one by one; the best batch on the way that guesses at all."""
        ks, tokens, longest, riders = [0] * len(states), float(len(states)), 0, 0.0
        costs = self.costs.of(len(states))
        best = _Choice(list(ks), 0.0)
        for nodes, (gain, index) in enumerate(self._gains(states, limits), start=len(states) + 1):
            riders += 0.0 if ks[index] else self._riders
            ks[index] += 1
            longest = max(longest, ks[index])
            tokens += gain
            rate = tokens / max(costs.round(nodes + round(riders), longest), SHORTEST)
            if rate > best.rate:
                best = _Choice(list(ks), rate)
        return best

    def _gains(self, states: list[_TextState], limits: list[int]) -> list[tuple[float, int]]:
        """Tokens that each further guess for each text promises, most first. Of one text they only ever fall."""
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
        found.sort(key=lambda pair: -pair[0])  # stable: of equals, the earlier text and the earlier guess
        return found

    def _may_probe(self, texts: int) -> bool:
        account = self._account
        if not account.opened:
            account.opened = True
            account.seconds = self.FIRST_PROBES * self.costs.of(texts).round(texts, 0)
        return account.seconds > 0 and account.seconds >= account.price

    # --- after a round ------------------------------------------------------------------------------------------------

    def observe(self, texts: list[Sequence], rounds: list[Round], timing: Timing) -> None:
        states = [self._state(text) for text in texts]
        self.costs.observe(timing, steady=all(state.behind <= self.SOON for state in states if state.asked))
        self._settle(timing, sum(len(done.emitted) for done in rounds))
        if not timing.guesses:
            return
        for state, done in zip(states, rounds):
            guesses = done.tree.guesses
            if guesses:
                self._riders += (done.tree.probes - self._riders) * (0.1 if self._riders else 1.0)
                reach = max(depths(done.tree.parents[:guesses])) + 1
                self._depth_share += 0.1 * (reach / guesses - self._depth_share)
                stood = len(done.verdict.path)  # also what an end cut off was judged
                state.rates.observe(reach, stood)
                self._rates_of(state.kind).observe(reach, stood)

    def _settle(self, timing: Timing, emitted: int) -> None:
        """Keep the account. A probe's loss is all that it cost beyond the plain time of what it wrote."""
        account, plain = self._account, self.costs.of(timing.texts).round(timing.texts, 0)
        account.seconds += self.PROBE_SHARE * timing.seconds
        if self._probing and timing.guesses:
            account.price = max(0.0, timing.seconds - plain * emitted / timing.texts)
            account.seconds -= account.price
        account.seconds = min(account.seconds, max(2 * account.price, self.FIRST_PROBES * plain))

    def forget(self, text: Sequence) -> None:
        self._texts.pop(text.number, None)

    def _state(self, text: Sequence) -> _TextState:
        state = self._texts.get(text.number)
        if state is None:
            state = self._texts[text.number] = _TextState(PositionRates(fade=0.97, weight=6.0), _kind(text))
        return state

    def _rates_of(self, kind: str) -> PositionRates:
        """How guesses of a kind fare. A client that brings a prediction has reason to expect that it holds."""
        rates = self._overall.get(kind)
        if rates is None:
            prior = EXPECTED if kind == PREDICTED else 0.55
            rates = self._overall[kind] = PositionRates(fade=0.995, prior=prior, weight=3.0)
        return rates


PREDICTED = "prediction"
EXPECTED = 0.9  # that a token of a prediction stands, before anything is known


def _kind(text: Sequence) -> str:
    """Texts that are drafted for in one way learn from each other: those of a method, those with a prediction."""
    return text.method or (PREDICTED if text.prediction else "")
