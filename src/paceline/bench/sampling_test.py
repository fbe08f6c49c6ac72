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

from paceline.bench.candidates import Setting, Subject
from paceline.bench.memoized_runner import MemoizedRunner
from paceline.bench.statistics import Fit, against_exact
from paceline.core.protocols import Drafter
from paceline.core.sampling import SamplingParams, distribution
from paceline.core.sequence import Sequence
from paceline.core.stats import SpecStats
from paceline.core.stopping import StopRules
from paceline.core.types import Capability
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.layerskip import LayerSkip
from paceline.engines.local.generate import run

Path = tuple[int, ...]
INSIDE = frozenset({Capability.HIDDEN_STATES, Capability.EARLY_EXIT})
LENGTH = 3  # tokens of an outcome
SUPPORT = 4  # candidates a token on large vocabularies: keeps the number of texts that can occur small
SMALL_VOCABULARY = 16
NARROWED = 256  # tokens, about, that a large vocabulary is confined to
FIRST_TOGETHER, MOST_TOGETHER = 4, 32  # texts a batch: few at first, so that a slow machine can stop in time


@dataclass(slots=True)
class Draws:
    """Outcomes counted so far, and what the rounds behind them did."""

    counts: Counter[Path] = field(default_factory=Counter)
    stats: SpecStats = field(default_factory=SpecStats)

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
    small = subject.target.info.vocab_size <= SMALL_VOCABULARY
    return SamplingParams(temperature=temperature, top_k=0 if small else SUPPORT)


@dataclass(frozen=True, slots=True)
class Desk:
    """Where one context is drawn from: the subject as it is run there, the context and the tokens in its numbers.

    names  the model's own number of each token, where the vocabulary was narrowed
    """

    subject: Subject
    target: MemoizedRunner
    context: list[int]
    names: list[int] | None = None

    def real(self, path: Path) -> list[int]:
        return list(path) if self.names is None else [self.names[token] for token in path]


class SamplingAudit:
    """Draws for one subject. Models are asked once about each text; drafting and judging are done anew every time.

    Drafters that look into the target see its real states, over its whole vocabulary; all others draft in a small one.
    Drafters with a model of another vocabulary run for real.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._target = MemoizedRunner(subject.target, states=Capability.HIDDEN_STATES in subject.target.capabilities)
        self._inside = replace(
            subject,
            target=self._target,
            drafters={method: _looking_in(drafter) for method, drafter in subject.drafters.items()},
        )
        self._desks: dict[Path, Desk] = {}

    def desk(self, method: str, context: list[int]) -> Desk:
        """The quickest place where this method drafts as it does for real."""
        drafter = self.subject.drafter(method)
        if _looks_inside(drafter):
            return Desk(self._inside, self._target, context)
        if _speaks_otherwise(drafter):
            return Desk(self.subject, self._target, context)
        key = tuple(context)
        if key not in self._desks:
            self._desks[key] = self._quick_desk(context)
        return self._desks[key]

    def _quick_desk(self, context: list[int]) -> Desk:
        names = self._likely(context) if self.subject.target.info.vocab_size > NARROWED else None
        target = MemoizedRunner(self.subject.target, names)
        quick = {
            method: _remembering(drafter, names)
            for method, drafter in self.subject.drafters.items()
            if not slow_to_draw(drafter)
        }
        numbers = None if names is None else {token: number for number, token in enumerate(names)}
        inside = context if numbers is None else [numbers[token] for token in context]
        return Desk(replace(self.subject, target=target, drafters=quick), target, inside, names)

    def _likely(self, context: list[int]) -> list[int]:
        """The context's own tokens and those likely to follow it: a vocabulary that is small and lifelike."""
        first = self._target.after(tuple(context)).topk(NARROWED // 2).indices.tolist()
        found = dict.fromkeys([*context, *first])
        for token in first[:SUPPORT]:
            after = self._target.after((*context, token))
            found.update(dict.fromkeys(after.topk(NARROWED // 8).indices.tolist()))
        return list(found)

    def exact(self, desk: Desk, sampling: SamplingParams, length: int = LENGTH) -> dict[Path, float]:
        """The probability of every continuation of `length` tokens that can occur."""
        found: dict[Path, float] = {(): 1.0}
        for _ in range(length):
            longer: dict[Path, float] = {}
            for path, uniforms in found.items():
                p = distribution(desk.target.after((*desk.context, *path)), sampling).double()
                p = p / p.sum()
                for token in torch.nonzero(p).flatten().tolist():
                    longer[(*path, token)] = uniforms * float(p[token])
            found = longer
        return found

    def draw(self, setting: Setting, desk: Desk, sampling: SamplingParams, effort: Effort, seed: int = 0) -> Draws:
        """Write the same short text many times, each with its own seed."""
        parts = desk.subject.parts(setting)
        found, began, together = Draws(), time.perf_counter(), FIRST_TOGETHER
        numbers = torch.Generator().manual_seed(seed)
        while found.total < effort.draws and (not found.total or time.perf_counter() - began < effort.seconds):
            seeds = torch.randint(1 << 62, (min(together, effort.draws - found.total),), generator=numbers).tolist()
            texts = [Sequence(desk.context, replace(sampling, seed=one), StopRules(LENGTH)) for one in seeds]
            for _ in run(texts, parts, max_num_seqs=together):
                pass
            together = min(2 * together, MOST_TOGETHER)
            for text in texts:
                found.counts[tuple(text.written)] += 1
                found.stats.add(text.stats)
        return found

    def fit(
        self,
        setting: Setting,
        context: list[int],
        effort: Effort,
        seed: int = 0,
        describe: Callable[[list[int]], str] = str,
    ) -> Evidence:
        """Draw, and hold the draws against the exact distribution."""
        sampling = sampling_for(self.subject, setting.temperature)
        desk = self.desk(setting.method, context)
        exact = self.exact(desk, sampling)
        drawn = self.draw(setting, desk, sampling, effort, seed)
        worst = max(exact | drawn.counts, key=lambda path: abs(drawn.counts[path] / drawn.total - exact.get(path, 0.0)))
        sentence = (
            f"{describe(desk.real(worst))} came {drawn.counts[worst] / drawn.total:.1%} of the time, "
            f"the target says {exact.get(worst, 0.0):.1%}"
        )
        return Evidence(against_exact(drawn.counts, exact), drawn.stats, sentence)


@dataclass(frozen=True, slots=True)
class Evidence:
    """A fit, the rounds it rests on, and the outcome that is furthest off."""

    fit: Fit
    stats: SpecStats
    furthest: str


def slow_to_draw(drafter: Drafter) -> bool:
    """Whether a draw costs more than a few sums: a head or an exit is run, or a model of another vocabulary."""
    return _looks_inside(drafter) or _speaks_otherwise(drafter)


def _looks_inside(drafter: Drafter) -> bool:
    """Whether a drafter needs the target itself and not only what it says."""
    return bool(drafter.needs & INSIDE)


def _speaks_otherwise(drafter: Drafter) -> bool:
    """Whether a drafter brings a model of another vocabulary."""
    return hasattr(drafter, "runner") and not isinstance(drafter, DraftModel)


def _looking_in(drafter: Drafter) -> Drafter:
    """A drafter that sees into a remembering target: an exit of it remembers too."""
    return drafter.with_runner(MemoizedRunner) if isinstance(drafter, LayerSkip) else drafter


def _remembering(drafter: Drafter, names: list[int] | None) -> Drafter:
    """A drafter of the same kind for texts in a desk's numbers; nothing it learns there reaches the real one."""
    if isinstance(drafter, DraftModel):
        runner = MemoizedRunner(drafter.runner, names)
        return DraftModel(runner, runner.info.vocab_size)
    return copy.deepcopy(drafter)
