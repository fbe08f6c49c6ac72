"""Plain against speculative decoding in turns, so that neither a busy machine nor a prompt read once can flatter one.

Only what follows the first step counts, so reading the prompt counts for neither side. A step that emits τ tokens takes
at least as long as a plain step: a speed-up above τ is noise, and is never stated as a result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from paceline.bench.statistics import Spread
from paceline.core.stats import SpecStats
from paceline.core.types import RequestOutput

Clock = Callable[[], float]


def exceeds_tokens_per_step(speedup: float, tokens_per_step: float) -> bool:
    """Whether a speed-up is noise: more than τ allows. A τ of 0 means that the steps were not counted."""
    return 0.0 < tokens_per_step < speedup


def noise(speedup: float, tokens_per_step: float) -> str:
    """Why a speed-up is not a result."""
    return f"{speedup:.2f}x, but {tokens_per_step:.2f} tokens a step allow no more than {tokens_per_step:.2f}x"


@dataclass(slots=True)
class TimedRun:
    """One output, and when its parts came."""

    token_ids: list[int] = field(default_factory=list)
    stats: SpecStats = field(default_factory=SpecStats)
    first_tokens: int = 0  # of the first step, which is over when the prompt has been read
    first_time: float | None = None
    last_time: float = 0.0

    @property
    def tokens(self) -> int:
        """After the first step."""
        return len(self.token_ids) - self.first_tokens if self.first_time is not None else 0

    @property
    def steps(self) -> int:
        """After the first step."""
        return max(self.stats.steps - 1, 0)

    @property
    def tokens_per_second(self) -> float:
        """After the first step. 0 where nothing came after it."""
        seconds = self.last_time - (self.first_time or 0.0)
        return self.tokens / seconds if self.tokens and seconds > 0 else 0.0

    def add(self, output: RequestOutput, now: float) -> None:
        if output.token_ids:
            self.token_ids += output.token_ids
            self.last_time = now
            if self.first_time is None and not output.from_draft:  # a step ends with a token of the target's own
                self.first_time, self.first_tokens = now, len(self.token_ids)
        if output.stats is not None:
            self.stats = output.stats


def timed(outputs: Iterable[RequestOutput], run: TimedRun, clock: Clock) -> Iterator[RequestOutput]:
    """Pass outputs on and note in `run` what came when."""
    for output in outputs:
        run.add(output, clock())
        yield output


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs of both sides, in pairs that were made right after each other."""

    plain: list[TimedRun]
    speculative: list[TimedRun]

    @property
    def identical(self) -> bool:
        return all(run.token_ids == self.plain[0].token_ids for run in (*self.plain, *self.speculative))

    @property
    def tokens_per_step(self) -> float:
        """τ of the speculative side, over the steps that are timed."""
        steps = sum(run.steps for run in self.speculative)
        return sum(run.tokens for run in self.speculative) / steps if steps else 1.0

    @property
    def speedups(self) -> Spread | None:
        """Of each pair, its speculative over its plain rate. None where no pair has both."""
        pairs = [(plain.tokens_per_second, run.tokens_per_second) for plain, run in zip(self.plain, self.speculative)]
        ratios = [after / before for before, after in pairs if before and after]
        return Spread.of(ratios) if ratios else None

    @property
    def is_noise(self) -> bool:
        """Whether the speed-up is more than the tokens per step allow."""
        return self.speedups is not None and exceeds_tokens_per_step(self.speedups.median, self.tokens_per_step)

    @property
    def speedup(self) -> float | None:
        """The median over the pairs. None where it would not be a result: outputs that differ, or noise."""
        if self.speedups is None or self.is_noise or not self.identical:
            return None
        return self.speedups.median

    def sentence(self) -> str:
        """The result, or why there is none."""
        spread = self.speedups
        if not self.identical:
            return "the outputs differ, so there is no speed-up to state"
        if spread is None:
            return "too few tokens to measure a speed-up"
        measured = f"{spread.median:.2f}x ({spread.low:.2f} to {spread.high:.2f} over {len(self.plain)} pairs of runs)"
        if self.is_noise:
            limit = f"{self.tokens_per_step:.2f} tokens a step allow no more than {self.tokens_per_step:.2f}x"
            return f"noise: measured {measured}, but {limit}; try again on an idle machine"
        if spread.low <= 1 <= spread.high:
            return f"no clear difference: {measured}"
        return f"{'faster' if spread.median > 1 else 'slower'}: {measured}"


def interleaved(plain: Callable[[], TimedRun], speculative: Callable[[], TimedRun], repeats: int) -> Comparison:
    """Run both sides in turns; every second pair begins with the other side."""
    runs: tuple[list[TimedRun], list[TimedRun]] = ([], [])
    sides = ((runs[0], plain), (runs[1], speculative))
    for repeat in range(repeats):
        for side, run in sides if repeat % 2 == 0 else sides[::-1]:
            side.append(run())
    return Comparison(*runs)
