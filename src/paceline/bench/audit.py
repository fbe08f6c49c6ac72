"""Proof that nothing changed, on the user's own models.

greedy        every method's text against the plain path's, and that against transformers'; differences are explained
sampled       for every method, acceptance rule and temperature: draws against the target's exact distribution

Every sampled check is a chi² test. All of them together raise a false alarm with probability `alpha`; each states how
far the output would have to be off to be found with 95% certainty.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from enum import Enum
from functools import partial
from typing import Any

from paceline.bench.candidates import PLAIN, Setting, Subject
from paceline.bench.measure import Length, write
from paceline.bench.near_ties import Kind, compare
from paceline.bench.sampling_test import Effort, Evidence, SamplingAudit, slow_to_draw
from paceline.bench.statistics import visible_distance
from paceline.core.draft_length import FixedDraftLength
from paceline.core.verify import COUPLED, LOSSLESS_RULES

DEFAULT_RULES = (*LOSSLESS_RULES, COUPLED)
DEFAULT_ALPHA = 0.001
Answer = Callable[..., list[int]]  # (prompt, length=...) -> answer


class Outcome(Enum):
    PASSED = "passed"
    FAILED = "FAILED"
    UNTESTED = "untested"  # no guess was ever judged, so nothing was shown


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    name: str
    kind: str
    outcome: Outcome
    detail: str
    seconds: float
    p_value: float | None = None
    draws: int | None = None
    visible: float | None = None  # total variation found with 95% certainty

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "outcome": self.outcome.value}


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """What to look at, and how hard."""

    contexts: list[list[int]]  # to draw from
    prompts: list[list[int]]  # to answer greedily
    methods: list[str]
    rules: tuple[str, ...] = DEFAULT_RULES
    temperatures: tuple[float, ...] = (0.7, 1.0)
    num_draft_tokens: int = 2
    length: Length = field(default_factory=Length)
    alpha: float = DEFAULT_ALPHA
    draws: int = 2000
    seconds: float = 600.0  # for all sampled checks together
    seed: int = 0
    reference: Answer | None = None  # transformers' greedy answer
    describe: Callable[[list[int]], str] = str
    every_pair: bool = True  # False: each method with the first rule, and each further rule with the first method

    def sampled_settings(self) -> list[Setting]:
        """A rule does not know who guessed, so a quick audit need not try every rule with every method."""
        pairs = [(method, rule) for method in self.methods for rule in self.rules]
        if not self.every_pair:
            pairs = [(m, r) for m, r in pairs if m == self.methods[0] or r == self.rules[0]]
        warm = [temperature for temperature in self.temperatures if temperature > 0]
        return [Setting(method, self.num_draft_tokens, heat, rule) for heat in warm for method, rule in pairs]


@dataclass(frozen=True, slots=True)
class Audit:
    """The result. `lossless` only if nothing failed and something was shown."""

    checks: list[Check]
    alpha: float

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.outcome is Outcome.FAILED]

    @property
    def lossless(self) -> bool:
        return not self.failed and any(check.outcome is Outcome.PASSED for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return {
            "lossless": self.lossless,
            "alpha": self.alpha,
            "failed": [check.name for check in self.failed],
            "checks": [check.as_dict() for check in self.checks],
        }


def audit(subject: Subject, plan: AuditPlan) -> Iterator[Check]:
    """Run every check, yielding each as it is done."""
    yield from greedy_checks(subject, plan)
    yield from sampled_checks(subject, plan)


# --- greedy -----------------------------------------------------------------------------------------------------------


def greedy_checks(subject: Subject, plan: AuditPlan) -> Iterator[Check]:
    """Every method against the plain path, and the plain path against transformers."""
    if not plan.prompts:
        return
    plain = [_greedy(subject, Setting(PLAIN), ids, plan.length) for ids in plan.prompts]
    if plan.reference is not None:
        yield _compared(subject, plan, plain, "plain = transformers", partial(plan.reference, length=plan.length))
    for method in plan.methods:
        answer = partial(_greedy, subject, Setting(method, plan.num_draft_tokens), length=plan.length)
        yield _compared(subject, plan, plain, f"greedy {method} = plain", answer)


def _greedy(subject: Subject, setting: Setting, ids: list[int], length: Length) -> list[int]:
    budget = FixedDraftLength(int(setting.num_draft_tokens))
    return write(subject, setting, [ids], length, budget=budget).answers[0]


def _compared(
    subject: Subject, plan: AuditPlan, plain: list[list[int]], name: str, answer: Callable[[list[int]], list[int]]
) -> Check:
    started = time.perf_counter()
    found = [compare(subject.target, ids, one, answer(ids)) for ids, one in zip(plan.prompts, plain)]
    same = sum(one.kind is Kind.SAME for one in found)
    ties = sum(one.kind is Kind.NEAR_TIE for one in found)
    detail = f"{same} of {len(found)} texts equal" + (f", {ties} part at a near-tie" if ties else "")
    bugs = [str(one) for one in found if one.kind is Kind.BUG]
    outcome = Outcome.FAILED if bugs else Outcome.PASSED
    detail += f"; {bugs[0]}" if bugs else ""
    return Check(name, "greedy", outcome, detail, time.perf_counter() - started)


# --- sampled ----------------------------------------------------------------------------------------------------------


def sampled_checks(subject: Subject, plan: AuditPlan) -> Iterator[Check]:
    """Every setting in every context, the time divided evenly."""
    laboratory = SamplingAudit(subject)
    jobs = [(setting, context) for setting in plan.sampled_settings() for context in plan.contexts]
    # The cheap ones first: time that they leave over goes to those that need it.
    jobs.sort(key=lambda job: slow_to_draw(subject.drafter(job[0].method)))
    threshold = plan.alpha / max(len(jobs), 1)
    began = time.perf_counter()
    for number, (setting, context) in enumerate(jobs):
        left = plan.seconds - (time.perf_counter() - began)
        effort = Effort(plan.draws, max(left, 0.0) / (len(jobs) - number))
        started = time.perf_counter()
        evidence = laboratory.fit(setting, context, effort, plan.seed + number, plan.describe)
        name = f"sampled {setting}" + (f" context {plan.contexts.index(context) + 1}" if len(plan.contexts) > 1 else "")
        yield judged(name, evidence, threshold, time.perf_counter() - started)


def judged(name: str, evidence: Evidence, threshold: float, seconds: float) -> Check:
    """Turn evidence into a verdict at one test's share of alpha."""
    fit = evidence.fit
    visible = visible_distance(fit.draws, fit.freedom, threshold)
    if fit.p_value < threshold:
        outcome, detail = Outcome.FAILED, f"p = {fit.p_value:.2g}: {evidence.furthest}"
    elif not evidence.stats.drafted:
        outcome, detail = Outcome.UNTESTED, "the method offered no guess in this context"
    else:
        outcome = Outcome.PASSED
        detail = (
            f"p = {fit.p_value:.2g} over {fit.draws} draws, {evidence.stats.drafted} guesses judged, "
            f"{evidence.stats.accepted} stood; a distance of {visible:.3f} would be found with 95% certainty"
        )
    return Check(name, "sampled", outcome, detail, seconds, fit.p_value, fit.draws, visible)
