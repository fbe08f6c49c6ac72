"""What a step costs, learned from the steps that run.

CostCurve       seconds by size, from samples
CostModel       the target's pass by its width, drafting by its draft tokens, and what batches cost beyond one sequence
BatchCostModel  the same for one batch size
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class StepTiming:
    """What one step cost.

    nodes             tokens that the target read in the pass
    num_draft_tokens  the most draft tokens of one sequence
    num_drafting      sequences with draft tokens, of all `num_seqs`
    clean             nothing was compiled or captured on the way: what it took is what such a step costs
    looped            one of several in a row, whose drafting and verifying are timed as one: in verify_seconds
    """

    draft_seconds: float
    verify_seconds: float
    nodes: int
    num_draft_tokens: int
    num_seqs: int
    num_drafting: int = 1
    clean: bool = True
    looped: bool = False

    @property
    def seconds(self) -> float:
        return self.draft_seconds + self.verify_seconds


class HiccupFilter:
    """Tells a measurement that was held up from a cost that has risen: the second one comes again."""

    OUTLIER = 4.0  # times what was expected

    def __init__(self, patience: int = 2, memory: int = 0, outlier: float = OUTLIER) -> None:
        """patience: outliers that are ignored. memory: other samples after which earlier outliers are forgotten."""
        self._patience, self._memory, self._outlier = patience, memory, outlier
        self._outliers = self._others = 0

    def is_hiccup(self, sample: float, expected: float) -> bool:
        """Whether to ignore a sample. Where nothing is expected every sample counts."""
        if expected <= 0 or sample <= self._outlier * expected:
            self._others += 1
            if self._others > self._memory:
                self._outliers = 0
            return False
        self._outliers, self._others = self._outliers + 1, 0
        return self._outliers <= self._patience


class _Sample(NamedTuple):
    """What a size was taken to cost after its last sample, how many samples there were, and the drift then."""

    seconds: float
    at: int
    drift: float


@dataclass(slots=True)
class _LookedUp:
    """What was computed of a curve since its last sample, by size: many times between two samples.

    at      of the curve itself
    passes  of the cost model that it belongs to
    """

    at: dict[int, float] = field(default_factory=dict)
    passes: dict[int, float] = field(default_factory=dict)

    def forget(self) -> None:
        self.at.clear()
        self.passes.clear()


class CostCurve:
    """Seconds by size (tokens in a pass, draft tokens in a step): straight lines between samples, smoothed over time.

    The longer a size was not sampled, the more a new sample of it counts: sequences grow and machines get busy.
    """

    WEIGHT = 0.2  # of a sample that follows another one
    MEMORY = 32  # samples of other sizes after which an old value counts half
    STALE = 16  # samples of other sizes after which what a size costs is limited by theirs
    MIXED_MEMORY = 16  # samples within which a second outlier shows that what is measured is mixed
    MIXED_OUTLIER = 2.0
    DRIFT_WEIGHT, MAX_DRIFT, SHIFT_EVERY = 0.03, 1.5, 8
    STEEP, MAX_RISE = 1.25, 2.0  # times the last value that one sample may count; each further one in a row counts more

    def __init__(self, seconds: dict[int, float] | None = None, unknown: float = 1.0, *, mixed: bool = False) -> None:
        """mixed: what is measured differs from sample to sample (a table lookup, a pass of a head), so that an outlier
        is no hiccup, and the mean is what counts."""
        self._mixed = mixed
        self._filter = HiccupFilter(1, self.MIXED_MEMORY, self.MIXED_OUTLIER) if mixed else HiccupFilter()
        self._unconfirmed: int | None = None  # a size whose one sample was the first of all: nothing was expected of it
        self._seconds = dict(sorted((seconds or {}).items()))
        self._unknown = unknown
        self._count = self._rises = 0  # samples; of them in a row: rising steeply
        first = -self.MEMORY // 2  # a first measurement soon counts half
        self._samples = {size: _Sample(value, first, 1.0) for size, value in self._seconds.items()}
        self._given, self._drift = dict(self._seconds), 1.0  # of the given values, by those that were sampled since
        self._sizes: list[int] = list(self._seconds)
        self.looked_up = _LookedUp()

    def add(self, size: int, seconds: float) -> None:
        self._confirm(size, seconds)
        expected = self.at(size) if self._sizes else 0.0
        if self._filter.is_hiccup(seconds, expected):
            return
        before, self._count = self._seconds.get(size), self._count + 1
        self._unconfirmed = size if self._count == 1 and expected <= 0 else None
        value = self._smoothed(size, before, seconds) if before else seconds
        self._seconds[size], self._samples[size] = value, _Sample(value, self._count, self._drift)
        if self._mixed and size:
            self._limit_larger(size)
        elif not self._mixed:
            self._limit_smaller(size)
            if self._given.get(size):
                self._shift_others(value / self._given[size])
        if before is None:
            self._sizes = sorted(self._seconds)
        self.looked_up.forget()

    def _shift_others(self, ratio: float) -> None:
        """What was measured before the first sequence was warm, and alone, or long ago behind a shorter context: where
        steps turn out to take longer, those of sizes that have not come since do too. Else wide passes would seem
        cheap beside narrow ones, which come far more often."""
        self._drift += self.DRIFT_WEIGHT * (min(max(ratio, 1 / self.MAX_DRIFT), self.MAX_DRIFT) - self._drift)
        if self._count % self.SHIFT_EVERY:
            return
        for size, sample in self._samples.items():
            if sample.at < 0 or self._count - sample.at > self.MEMORY:
                self._seconds[size] = sample.seconds * self._drift / sample.drift

    def _limit_larger(self, size: int) -> None:
        """Twice the draft tokens cost at most twice as much: a larger size that seems to cost more was held up."""
        each = self._seconds[size] / size
        for larger, sample in self._samples.items():
            if larger > size and self._count - sample.at > self.STALE:
                self._seconds[larger] = min(self._seconds[larger], each * larger)

    def _limit_smaller(self, size: int) -> None:
        """Fewer tokens never cost more: a smaller size that seems to was measured at a busy moment, or long ago."""
        seconds = self._seconds[size]
        for smaller, sample in self._samples.items():
            if smaller < size and self._count - sample.at > self.STALE:
                self._seconds[smaller] = min(self._seconds[smaller], seconds)

    def _confirm(self, size: int, seconds: float) -> None:
        """The very first sample is kept unless the next one shows that it was held up."""
        first, self._unconfirmed = self._unconfirmed, None
        if first is not None and self._seconds[first] > HiccupFilter.OUTLIER * seconds * max(1.0, first / max(1, size)):
            del self._seconds[first], self._samples[first]
            self._sizes = sorted(self._seconds)
            self.looked_up.forget()

    def _smoothed(self, size: int, before: float, seconds: float) -> float:
        if not self._mixed and HiccupFilter.OUTLIER * seconds < before:
            return seconds  # nothing is so much quicker by chance
        age = self._count - self._samples[size].at
        weight = max(self.WEIGHT, age / (age + self.MEMORY))
        self._rises = self._rises + 1 if seconds > self.STEEP * before else 0
        bounded = seconds if self._mixed else min(seconds, self._max_rise(weight) * before)
        return before + weight * (bounded - before)

    def _max_rise(self, weight: float) -> float:
        """Times the last value that a sample may count. One pass that was held up must not make plain steps look
        expensive and draft tokens cheap; a cost that keeps rising, or is long out of date, counts in full."""
        return self.MAX_RISE if weight > self.WEIGHT else min(self.MAX_RISE, self.STEEP ** max(1, self._rises))

    @property
    def largest(self) -> int:
        """The largest size that was sampled; the cost of larger ones is not known."""
        return self._sizes[-1] if self._sizes else 0

    def at(self, size: int) -> float:
        seconds = self.looked_up.at.get(size)
        if seconds is None:
            seconds = self.looked_up.at[size] = self._interpolate(size)
        return seconds

    def _interpolate(self, size: int) -> float:
        sizes = self._sizes
        if not sizes:
            return self._unknown
        right = bisect_left(sizes, size)
        if right < len(sizes) and sizes[right] == size:
            return self._seconds[size]
        if right == 0:
            return self._seconds[sizes[0]]
        low = sizes[right - 1]
        if right == len(sizes):
            return self._seconds[low] + self._slope_beyond() * (size - low)
        return self._seconds[low] + self._slope(low, sizes[right]) * (size - low)

    def _slope_beyond(self) -> float:
        """Beyond the largest sample the cost is assumed to go on growing: the cautious estimate."""
        last = self._sizes[-1]
        if len(self._sizes) == 1:
            return self._seconds[last] / last if last else 0.0
        return max(0.0, self._slope(self._sizes[-2], last))

    def _slope(self, low: int, high: int) -> float:
        return (self._seconds[high] - self._seconds[low]) / (high - low)

    @property
    def is_confirmed(self) -> bool:
        """Whether more than one sample stands behind it; the first one may have been held up."""
        return self._unconfirmed is None

    def copy(self) -> CostCurve:
        return CostCurve(self._seconds, self._unknown, mixed=self._mixed)

    @property
    def sizes(self) -> list[int]:
        """Sizes with samples, in rising order."""
        return self._sizes

    def as_dict(self) -> dict[int, float]:
        return {size: self._seconds[size] for size in self._sizes}


def draft_curve(seconds: dict[int, float] | None = None) -> CostCurve:
    """What drafting costs by draft tokens in a step: none cost nothing, and so do all until one is sampled."""
    return CostCurve({0: 0.0, **(seconds or {})}, unknown=0.0, mixed=True)


STRETCH_WEIGHT, MIN_STRETCH, MAX_STRETCH, MIN_ADDED = 0.1, 0.5, 8.0, 0.1
CATCH_UP_WEIGHT = 0.3
MIN_REHEARSED = 3  # numbers of draft tokens; fewer make no curve
SHARE_WEIGHT, MAX_SHARE = 0.3, 2.0


@dataclass(slots=True)
class CostModel:
    """What a step costs: the target's pass by the tokens in it, and drafting by its number of draft tokens.

    A pass over one token of eight sequences is not a pass over eight tokens of one, so a batch size has its own curve
    for plain passes. What draft tokens add is read off the curve of one sequence, stretched by what they added lately:
    batch sizes change all the time, and each would otherwise have to be sampled at every width.

    grain     tokens a kernel takes at a time: beyond it only whole grains differ in cost
    stretch   how much more a draft token adds to the pass of a batch than to one of a single sequence
    share     of what drafting for one sequence costs, what each further sequence adds
    catch_up  seconds for each token of a sequence that the drafter has not read when it drafts
    """

    verify: CostCurve = field(default_factory=CostCurve)
    draft: CostCurve = field(default_factory=draft_curve)
    grain: int = 1
    plain: CostCurve = field(default_factory=CostCurve)  # by sequences in a batch
    stretch: float = 1.0
    share: float = 0.1
    catch_up: float = 0.0
    filters: tuple[HiccupFilter, HiccupFilter, HiccupFilter] = field(  # of stretch, share and catch_up
        default_factory=lambda: (HiccupFilter(), HiccupFilter(), HiccupFilter()), repr=False
    )

    @classmethod
    def known(cls, pass_seconds: dict[int, float], draft_seconds: dict[int, float], grain: int = 1) -> CostModel:
        """From seconds that were measured earlier, by tokens in a pass and by draft tokens in a step."""
        return cls(CostCurve(pass_seconds), draft_curve(draft_seconds), grain)

    def of(self, num_seqs: int) -> BatchCostModel:
        """The costs of a batch of this many sequences."""
        size = max(1, num_seqs)
        return BatchCostModel(self, size, self.plain_pass(size), self.width(size))

    def adopt(self, timings: list[StepTiming]) -> None:
        """Start from steps of one sequence that were measured as a whole, if there are enough: on a GPU the time of a
        draft is seen where its result is waited for, which passes measured alone do not show."""
        by_k: dict[int, list[StepTiming]] = {}
        for timing in timings:
            if timing.num_seqs == 1 and timing.nodes == timing.num_draft_tokens + 1:
                by_k.setdefault(timing.num_draft_tokens, []).append(timing)
        if 0 not in by_k or len(by_k) < MIN_REHEARSED:
            return
        self.verify = CostCurve({k + 1: median(step.verify_seconds for step in steps) for k, steps in by_k.items()})
        self.draft = draft_curve({k: median(step.draft_seconds for step in steps) for k, steps in by_k.items() if k})

    # --- learning -----------------------------------------------------------------------------------------------------

    def observe(self, timing: StepTiming, *, caught_up: int = 0) -> None:
        """Learn from one step. caught_up: tokens that the drafter first had to read, which the next step will not."""
        if timing.num_seqs <= 1:
            self.verify.add(self.padded(timing.nodes), timing.verify_seconds)
        elif timing.nodes == timing.num_seqs:
            self.plain.add(timing.num_seqs, timing.verify_seconds)
        else:
            self._observe_stretch(timing)
        if timing.num_draft_tokens and caught_up:
            self._observe_catch_up(timing, caught_up)
        elif timing.num_draft_tokens:
            self._observe_draft(timing)

    def _observe_stretch(self, timing: StepTiming) -> None:
        if self.filters[0].is_hiccup(timing.verify_seconds, self.of(timing.num_seqs).pass_of(timing.nodes)):
            return
        narrow = self.width(timing.num_seqs)
        added = self.width(timing.nodes) - narrow
        if added > MIN_ADDED * narrow:  # below that, noise is divided by nothing
            sample = (timing.verify_seconds - self.of(timing.num_seqs).pass_of(timing.num_seqs)) / added
            self.stretch += STRETCH_WEIGHT * (min(max(sample, MIN_STRETCH), MAX_STRETCH) - self.stretch)

    def _observe_catch_up(self, timing: StepTiming, caught_up: int) -> None:
        """A cost that is far too high falls at once; it rises slowly."""
        drafting = self.drafting(timing.num_drafting, timing.num_draft_tokens)
        sample = max(0.0, timing.draft_seconds - drafting) / caught_up
        if not self.catch_up or HiccupFilter.OUTLIER * sample < self.catch_up:
            self.catch_up = sample
        elif not self.filters[2].is_hiccup(sample, self.catch_up):
            bounded = min(sample, HiccupFilter.OUTLIER * self.catch_up)
            self.catch_up += CATCH_UP_WEIGHT * (bounded - self.catch_up)

    def _observe_draft(self, timing: StepTiming) -> None:
        """One sequence teaches what draft tokens cost, several teach what each further sequence adds."""
        alone, others = self.draft.at(timing.num_draft_tokens), timing.num_drafting - 1
        if others <= 0 or alone <= 0:
            self.draft.add(timing.num_draft_tokens, timing.draft_seconds / (1.0 + self.share * others))
        elif not self.filters[1].is_hiccup(timing.draft_seconds, self.drafting(others + 1, timing.num_draft_tokens)):
            sample = (timing.draft_seconds / alone - 1.0) / others
            self.share += SHARE_WEIGHT * (min(max(sample, 0.0), MAX_SHARE) - self.share)

    # --- costs --------------------------------------------------------------------------------------------------------

    def catching_up(self, tokens: int) -> float:
        """Seconds a drafter needs to read what it has not read yet."""
        return self.catch_up * tokens

    def stretch_of(self, num_seqs: int) -> float:
        return self.stretch if num_seqs > 1 else 1.0

    def plain_pass(self, num_seqs: int) -> float:
        """A plain pass of a batch; of a size without samples, that of the nearest and the difference in width."""
        if num_seqs == 1:
            return self.width(1)
        nearest = min((1, *self.plain.sizes), key=lambda size: abs(size - num_seqs))
        seconds = self.width(1) if nearest == 1 else self.plain.at(nearest)
        return seconds + self.width(num_seqs) - self.width(nearest)

    def drafting(self, num_drafting: int, num_draft_tokens: int) -> float:
        """This many draft tokens in a row for each of `num_drafting` sequences, together."""
        if not num_drafting:
            return 0.0
        return self.draft.at(num_draft_tokens) * (1.0 + self.share * (num_drafting - 1))

    def pass_alone(self, nodes: int) -> float:
        """`of(1).pass_of`, for the sums of one sequence in every step: looked up many times."""
        seconds = self.verify.looked_up.passes.get(nodes)
        if seconds is None:
            plain = self.pass_alone(1) if nodes > 1 else 0.0
            seconds = self.verify.looked_up.passes[nodes] = max(plain, self.width(nodes))
        return seconds

    def width(self, nodes: int) -> float:
        """A pass over this many tokens of one sequence."""
        return self.verify.at(self.padded(nodes))

    def padded(self, nodes: int) -> int:
        """Tokens of a pass, in whole grains beyond the first."""
        return nodes if nodes <= self.grain else -(-nodes // self.grain) * self.grain


@dataclass(frozen=True, slots=True)
class BatchCostModel:
    """What a step of `num_seqs` sequences costs. Used hundreds of times a plan, so what does not change is held."""

    costs: CostModel
    num_seqs: int
    plain: float  # a pass without draft tokens
    narrow: float  # what the curve of one sequence has for as many tokens

    def pass_of(self, nodes: int) -> float:
        """More tokens never cost less, whatever a curve has whose points were measured at different times."""
        return self.plain + self.costs.stretch_of(self.num_seqs) * max(0.0, self.costs.width(nodes) - self.narrow)

    def step(self, nodes: int, num_draft_tokens: int = 0, num_drafting: int = 0) -> float:
        """A step over this many tokens, in which `num_drafting` sequences have up to `num_draft_tokens` each."""
        return self.pass_of(nodes) + self.costs.drafting(num_drafting, num_draft_tokens)
