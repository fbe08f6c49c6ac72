"""What the theory says about a setting, from what was counted and what passes cost.

Tokens per step come from acceptance by position (plan.predict holds the formula). Lookup methods do not always have a
guess, and trees spend several guesses on one depth; predictions weigh both by how the method was seen to behave.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median

from paceline.bench.measure import Mark, Written
from paceline.core.cost_model import CostCurve, StepTiming
from paceline.plan.predict import tokens_per_step_by_position


@dataclass(frozen=True, slots=True)
class Habits:
    """How a method behaves on a workload when it is asked for `k` guesses.

    rates   of each depth: how often a guess there stood, of the rounds in which all before it stood
    offers  the share of rounds in which it had a guess at all
    filled  guesses offered of those asked for, in rounds with a guess
    depth   depths a guess adds: 1 in a chain, less in a tree
    draft   seconds of drafting a round
    once    seconds of drafting spent once a text, before anything can be guessed
    """

    k: int
    rates: list[float]
    offers: float
    filled: float
    depth: float
    draft: float
    once: float = 0.0

    def tokens_per_step(self, k: int) -> float:
        """Expected tokens of a round that asks for k guesses; a part of a depth counts in part."""
        reach = k * self.filled * self.depth
        whole = int(reach)
        rates = [self.rates[min(depth, len(self.rates) - 1)] if self.rates else 0.0 for depth in range(whole + 1)]
        low, high = tokens_per_step_by_position(rates[:whole]), tokens_per_step_by_position(rates)
        return 1.0 + self.offers * (low + (reach - whole) * (high - low) - 1.0)

    def verify_seconds(self, k: int, verify: CostCurve, texts: int = 1) -> float:
        """The target's pass of an average round; `verify` is by the tokens in a pass."""
        guessing = verify.at(texts * (1 + max(1, round(k * self.filled))))
        return self.offers * guessing + (1 - self.offers) * verify.at(texts)


@dataclass(frozen=True, slots=True)
class Answers:
    """What answering costs without guessing: tokens of an answer, seconds around its rounds, the pass by its width."""

    tokens: float
    around: float
    verify: CostCurve
    texts: int = 1

    @property
    def plain_seconds(self) -> float:
        return self.around + self.tokens / self.texts * self.verify.at(self.texts)

    def seconds(self, habits: Habits, k: int, draft: CostCurve) -> float:
        """Seconds of an answer written with k guesses a round."""
        rounds = self.tokens / self.texts / habits.tokens_per_step(k)
        return self.around + habits.once + rounds * (habits.verify_seconds(k, self.verify, self.texts) + draft.at(k))

    def speedup(self, habits: Habits, k: int, draft: CostCurve) -> float:
        return self.plain_seconds / self.seconds(habits, k, draft)

    def shortest_worth_it(self, habits: Habits, k: int, draft: CostCurve) -> int:
        """Tokens an answer must have before what the draft costs once is earned; 0 where it costs nothing once."""
        step = habits.tokens_per_step(k)
        round_seconds = habits.verify_seconds(k, self.verify, self.texts) + draft.at(k)
        saved = (self.verify.at(self.texts) - round_seconds / step) / self.texts  # a token
        return int(habits.once / saved) + 1 if saved > 0 and habits.once > 0 else 0


def habits_of(runs: list[Written], k: int, verify: CostCurve) -> Habits:
    """Learn a method's habits from texts written with a fixed k; `verify` is what plain passes cost."""
    marks = [mark for written in runs for mark in written.marks]
    offering = [mark for mark in marks if mark.offered]
    offered = sum(mark.offered for mark in offering)
    return Habits(
        k,
        conditional_rates(offering),
        len(offering) / len(marks) if marks else 0.0,
        offered / (k * len(offering)) if offering and k else 1.0,
        sum(mark.reach for mark in offering) / offered if offered else 1.0,
        _draft_round(runs, verify),
        _once(runs, verify),
    )


def conditional_rates(marks: Iterable[Mark]) -> list[float]:
    """Of each depth: stood there, of the rounds that reached it with a guess to judge."""
    tried: list[int] = []
    stood: list[int] = []
    for mark in marks:
        for depth in range(min(mark.reach, mark.accepted + 1)):
            if depth == len(tried):
                tried.append(0)
                stood.append(0)
            tried[depth] += 1
            stood[depth] += depth < mark.accepted
    return [good / all_ for good, all_ in zip(stood, tried)]


def observed_curve(measured: CostCurve, runs: list[Written]) -> CostCurve:
    """A curve measured on an empty machine, put right by what passes of real texts took.

    Real texts are longer, so their passes cost a little more. Widths that were seen often take the median seen; the
    others are moved as the nearest seen one is.
    """
    seen: dict[int, list[float]] = {}
    for timing in (timing for written in runs for timing in written.timings):
        seen.setdefault(timing.nodes, []).append(timing.verify_seconds)
    known = {nodes: median(taken) for nodes, taken in seen.items() if len(taken) >= 5}
    if not known:
        return measured
    moved = {
        nodes: seconds * known[nearest] / measured.at(nearest)
        for nodes, seconds in measured.as_dict().items()
        for nearest in [min(known, key=lambda other: abs(other - nodes))]
    }
    return CostCurve({**moved, **known})


def _draft_round(runs: list[Written], verify: CostCurve) -> float:
    """Seconds of drafting a round, without each text's first, in which the prompt is read too."""
    later = [_drafting(written, timing, verify) for written in runs for timing in written.timings[1:]]
    return fmean(later) if later else 0.0


def _once(runs: list[Written], verify: CostCurve) -> float:
    """What the first round of a text costs beyond the others."""
    first = [_drafting(written, written.timings[0], verify) for written in runs if written.timings]
    return max(0.0, fmean(first) - _draft_round(runs, verify)) if first else 0.0


def _drafting(written: Written, timing: StepTiming, verify: CostCurve) -> float:
    """Seconds of a round spent on guessing. Where the host does not see them, what the round took beyond a pass."""
    if not written.drafts_unseen:
        return timing.draft_seconds
    return max(timing.draft_seconds, timing.seconds - verify.at(timing.nodes))
