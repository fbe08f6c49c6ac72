"""What a step costs, learned as steps go by.

CostCurve   seconds by size, from samples
CostModel       the target's pass by its width, the draft by its draft tokens, and what batches pay beyond one sequence
BatchCostModel  the same, asked for one size of batch
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepTiming:
    """What one step cost.

    nodes    tokens read by the target in the pass
    draft tokens  the most drafted for one sequence
    asked    sequences that were drafted for, of all `num_seqs`
    """

    draft_seconds: float
    verify_seconds: float
    nodes: int
    num_draft_tokens: int
    num_seqs: int
    asked: int = 1

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds


class CostCurve:
    """Seconds by size (tokens in a pass, draft tokens in a step): straight lines between what was seen, smoothed over time.

    The longer a size was not seen, the more a new sample of it counts: sequences grow and machines get busy.
    """

    WEIGHT = 0.2  # of a sample that follows another one
    MEMORY = 32  # samples of other sizes after which an old value counts half
    FAR = 4.0  # times what was known: a hiccup of the machine, not the price of a pass …
    PATIENCE = 2  # … unless it happens more often than this in a row
    STEEPEST, MOST = 1.25, 2.0  # times what was known that one sample may say; each further one in a row may say more

    def __init__(self, seen: dict[int, float] | None = None, unknown: float = 1.0, *, mixed: bool = False) -> None:
        """mixed: what is paid for differs from sample to sample (a look into a table, a run of a head), so that what
        stands out is no hiccup, and the mean is what counts."""
        self._mixed = mixed
        self._seen = dict(sorted((seen or {}).items()))
        self._unknown = unknown
        self._count = self._doubted = self._rises = 0  # samples; of them in a row: not believed, rising steeply
        self._when = dict.fromkeys(self._seen, -self.MEMORY // 2)  # a first measurement is not the last word
        self._known: list[int] = list(self._seen)
        self._answers: dict[int, float] = {}  # asked many times between two samples

    def add(self, size: int, seconds: float) -> None:
        before = self._seen.get(size)
        if before and not self._mixed and seconds > self.FAR * before and self._doubted < self.PATIENCE:
            self._doubted += 1
            return
        self._doubted, self._count = 0, self._count + 1
        if before:
            age = self._count - self._when[size]
            weight = max(self.WEIGHT, age / (age + self.MEMORY))
            self._rises = self._rises + 1 if seconds > self.STEEPEST * before else 0
            believed = seconds if self._mixed else min(seconds, self._most(weight) * before)
            seconds = before + weight * (believed - before)
        self._seen[size], self._when[size] = seconds, self._count
        self._known = sorted(self._seen) if before is None else self._known
        self._answers.clear()

    def _most(self, weight: float) -> float:
        """Times what was known that a sample may say. One pass that was held up must not make plain steps look dear
        and draft tokens cheap; but a price that keeps rising, or has long not been looked at, is believed."""
        return self.MOST if weight > self.WEIGHT else min(self.MOST, self.STEEPEST ** max(1, self._rises))

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
        """Beyond what was seen, cost can only be assumed to go on growing: the cautious draft token."""
        last = self._known[-1]
        if len(self._known) == 1:
            return self._seen[last] / last if last else 0.0
        return max(0.0, self._slope(self._known[-2], last))

    def _slope(self, low: int, high: int) -> float:
        return (self._seen[high] - self._seen[low]) / (high - low)

    def copy(self) -> CostCurve:
        return CostCurve(self._seen, self._unknown, mixed=self._mixed)

    @property
    def sizes(self) -> list[int]:
        """What was seen, in rising order."""
        return self._known

    def as_dict(self) -> dict[int, float]:
        return {size: self._seen[size] for size in self._known}


def draft_curve(seconds: dict[int, float] | None = None) -> CostCurve:
    """What drafting costs by draft tokens in a step: none cost nothing, and so do all until one is tried."""
    return CostCurve({0: 0.0, **(seconds or {})}, unknown=0.0, mixed=True)


STRETCH_WEIGHT, LEAST_STRETCH, MOST_STRETCH, LEAST_ADDED = 0.1, 0.5, 8.0, 0.1
LATE_WEIGHT = 0.3
CROWD_WEIGHT, MOST_CROWD = 0.3, 2.0


@dataclass(slots=True)
class CostModel:
    """What a step costs: the target's pass by the tokens in it, and the draft by its number of draft tokens.

    A pass over one token of eight sequences is not a pass over eight tokens of one, so a batch learns on its own what a
    plain pass costs it. What draft tokens add is read off the curve of one sequence, stretched by what they really added lately:
    batch sizes change all the time, and each would have to be tried at every width before it knew anything for itself.
    """

    verify: CostCurve = field(default_factory=CostCurve)
    draft: CostCurve = field(default_factory=draft_curve)
    grain: int = 1  # tokens a kernel takes at a time: beyond it, only whole grains differ in price
    plain: CostCurve = field(default_factory=CostCurve)  # by sequences in a batch
    stretch: float = 1.0
    crowd: float = 0.1  # of what drafting for one sequence costs, what each further sequence adds
    late: float = 0.0  # seconds a token that a draft has not seen when it is asked for a draft token

    @classmethod
    def known(cls, pass_seconds: dict[int, float], draft_seconds: dict[int, float], grain: int = 1) -> CostModel:
        """From seconds that were measured earlier, by tokens in a pass and by draft tokens in a step."""
        return cls(CostCurve(pass_seconds), draft_curve(draft_seconds), grain)

    def of(self, num_seqs: int) -> BatchCostModel:
        """The costs of a batch of so many sequences."""
        many = max(1, num_seqs)
        return BatchCostModel(self, many, self.plain_of(many), self.width(many))

    def observe(self, timing: StepTiming, *, caught_up: int = 0) -> None:
        """Learn from one step. caught_up: tokens that the draft first had to read, which no next step will cost."""
        if timing.num_seqs <= 1:
            self.verify.add(self.whole(timing.nodes), timing.verify_seconds)
        elif timing.nodes == timing.num_seqs:
            self.plain.add(timing.num_seqs, timing.verify_seconds)
        else:
            self._observe_stretch(timing)
        if timing.num_draft_tokens and caught_up:
            beyond = max(0.0, timing.draft_seconds - self.drafting(timing.asked, timing.num_draft_tokens)) / caught_up
            self.late += (LATE_WEIGHT if self.late else 1.0) * (beyond - self.late)
        elif timing.num_draft_tokens:
            self._observe_draft(timing)

    def catching_up(self, tokens: int) -> float:
        """Seconds a draft needs to read what it has not seen."""
        return self.late * tokens

    def _observe_stretch(self, timing: StepTiming) -> None:
        narrow = self.width(timing.num_seqs)
        added = self.width(timing.nodes) - narrow
        if added > LEAST_ADDED * narrow:  # below that, noise is divided by nothing
            seen = (timing.verify_seconds - self.of(timing.num_seqs).pass_of(timing.num_seqs)) / added
            self.stretch += STRETCH_WEIGHT * (min(max(seen, LEAST_STRETCH), MOST_STRETCH) - self.stretch)

    def stretch_of(self, num_seqs: int) -> float:
        """How much more a draft token adds to a pass of a batch than to one of a single sequence."""
        return self.stretch if num_seqs > 1 else 1.0

    def plain_of(self, num_seqs: int) -> float:
        """A plain pass of a batch; of a size never seen, what the nearest one pays and the difference in width."""
        nearest = min((1, *self.plain.sizes), key=lambda size: abs(size - num_seqs))
        known = self.width(1) if nearest == 1 else self.plain.at(nearest)
        return known + self.width(num_seqs) - self.width(nearest)

    def drafting(self, asked: int, draft_tokens: int) -> float:
        """Drafting so many draft tokens in a row for each of `asked` sequences, together."""
        return self.draft.at(draft_tokens) * (1.0 + self.crowd * (asked - 1)) if asked else 0.0

    def _observe_draft(self, timing: StepTiming) -> None:
        """One sequence teaches what draft tokens cost, several teach what each further one adds."""
        alone = self.draft.at(timing.num_draft_tokens)
        if timing.asked <= 1 or alone <= 0:
            self.draft.add(timing.num_draft_tokens, timing.draft_seconds / (1.0 + self.crowd * (timing.asked - 1)))
        else:
            seen = (timing.draft_seconds / alone - 1.0) / (timing.asked - 1)
            self.crowd += CROWD_WEIGHT * (min(max(seen, 0.0), MOST_CROWD) - self.crowd)

    def width(self, nodes: int) -> float:
        """A pass over so many tokens of one sequence."""
        return self.verify.at(self.whole(nodes))

    def whole(self, nodes: int) -> int:
        return nodes if nodes <= self.grain else -(-nodes // self.grain) * self.grain


@dataclass(frozen=True, slots=True)
class BatchCostModel:
    """What a step of `num_seqs` sequences costs. Asked hundreds of times a plan, so what does not change is held."""

    costs: CostModel
    num_seqs: int
    plain: float  # a pass without draft tokens
    narrow: float  # what the curve of one sequence says of as many tokens

    def pass_of(self, nodes: int) -> float:
        """More tokens never cost less, whatever a curve that was measured at different times says."""
        return self.plain + self.costs.stretch_of(self.num_seqs) * max(0.0, self.costs.width(nodes) - self.narrow)

    def round(self, nodes: int, draft_tokens: int = 0, asked: int = 0) -> float:
        """A step of so many tokens; `asked` sequences have draft tokens, the longest run of them is `guesses`."""
        return self.pass_of(nodes) + self.costs.drafting(asked, draft_tokens)
