"""Many short texts from one context, written speculatively, against the exact distribution of what the target says.

The first LENGTH tokens after a context are one outcome. Its exact probability is a product of the target's own
next-token probabilities, so every acceptance, rejection, residual and bonus token of a round shows in the counts.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from paceline.bench.remembering import RememberingRunner
from paceline.bench.statistics import Fit, against_exact
from paceline.bench.subject import Setting, Subject
from paceline.core.distribution import SamplingParams, distribution
from paceline.core.protocols import Ability, Drafter
from paceline.core.sequence import Sequence
from paceline.core.stopping import StopRules
from paceline.core.tally import Tally
from paceline.decode.generate import run

Path = tuple[int, ...]
LENGTH = 3  # tokens of an outcome
SUPPORT = 4  # candidates a token on large vocabularies: keeps the number of texts that can occur small
SMALL_VOCABULARY = 16
TOGETHER = 16  # texts a batch


@dataclass(slots=True)
class Draws:
    """Outcomes counted so far, and what the rounds behind them did."""

    counts: Counter[Path] = field(default_factory=Counter)
    tally: Tally = field(default_factory=Tally)

    @property
    def total(self) -> int:
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True)
class Effort:
    """When to stop drawing. The clock knows nothing of the outcomes, so stopping by it keeps the test honest."""

    draws: int = 2000
    seconds: float = 60.0


def sampling_for(subject: Subject, temperature: float) -> SamplingParams:
    """The settings an audit draws with. On a large vocabulary only the likeliest few tokens take part."""
    small = subject.target.card.vocab_size <= SMALL_VOCABULARY
    return SamplingParams(temperature=temperature, top_k=0 if small else SUPPORT)


class Laboratory:
    """Draws for one subject. Models are asked once about each text; drafters that look into the target run for real."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._target = RememberingRunner(subject.target)
        drafters = {method: self._remembering(drafter) for method, drafter in subject.drafters.items()}
        self._quick = replace(subject, target=self._target, drafters=drafters)

    def _remembering(self, drafter: Drafter) -> Drafter:
        runner = getattr(drafter, "runner", None)
        if runner is None or _looks_inside(drafter):
            return drafter
        twin = copy.copy(drafter)
        twin.runner = RememberingRunner(runner)  # type: ignore[attr-defined]
        return twin

    def exact(self, context: list[int], sampling: SamplingParams, length: int = LENGTH) -> dict[Path, float]:
        """The probability of every continuation of `length` tokens that can occur."""
        found: dict[Path, float] = {(): 1.0}
        for _ in range(length):
            longer: dict[Path, float] = {}
            for path, chance in found.items():
                p = distribution(self._target.after(context + list(path)), sampling).double()
                p = p / p.sum()
                for token in torch.nonzero(p).flatten().tolist():
                    longer[(*path, token)] = chance * float(p[token])
            found = longer
        return found

    def draw(
        self, setting: Setting, context: list[int], sampling: SamplingParams, effort: Effort, seed: int = 0
    ) -> Draws:
        """Write the same short text many times, each with its own seed."""
        subject = self.subject if _looks_inside(self.subject.drafter(setting.method)) else self._quick
        machinery = subject.machinery(setting)
        found, began = Draws(), time.perf_counter()
        numbers = torch.Generator().manual_seed(seed)
        while found.total < effort.draws and (not found.total or time.perf_counter() - began < effort.seconds):
            seeds = torch.randint(1 << 62, (min(TOGETHER, effort.draws - found.total),), generator=numbers).tolist()
            texts = [Sequence(context, replace(sampling, seed=one), StopRules(LENGTH)) for one in seeds]
            for _ in run(texts, machinery, largest_batch=TOGETHER):
                pass
            for text in texts:
                found.counts[tuple(text.written)] += 1
                found.tally.add(text.tally)
        return found

    def fit(
        self,
        setting: Setting,
        context: list[int],
        effort: Effort,
        seed: int = 0,
        describe: Callable[[Path], str] = str,
    ) -> Evidence:
        """Draw, and hold the draws against the exact distribution."""
        sampling = sampling_for(self.subject, setting.temperature)
        exact = self.exact(context, sampling)
        drawn = self.draw(setting, context, sampling, effort, seed)
        worst = max(exact | drawn.counts, key=lambda path: abs(drawn.counts[path] / drawn.total - exact.get(path, 0.0)))
        sentence = (
            f"{describe(worst)} came {drawn.counts[worst] / drawn.total:.1%} of the time, "
            f"the target says {exact.get(worst, 0.0):.1%}"
        )
        return Evidence(against_exact(drawn.counts, exact), drawn.tally, sentence)


@dataclass(frozen=True, slots=True)
class Evidence:
    """A fit, the rounds it rests on, and the outcome that is furthest off."""

    fit: Fit
    tally: Tally
    furthest: str


def _looks_inside(drafter: Drafter) -> bool:
    """Whether a drafter needs the target itself and not only what it says."""
    return bool(drafter.needs & {Ability.HIDDEN, Ability.EXIT})
