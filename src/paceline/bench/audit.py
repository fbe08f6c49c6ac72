"""Proof that the output is unchanged, on the user's own models.

greedy   every method's output against plain decoding, and that against transformers; differences are explained
sampled  for every method, acceptance rule and temperature: draws against the target's exact distribution

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

from paceline.bench.candidates import Candidates, DecodeSetting
from paceline.bench.measure import MeasuredEngine, OutputLength
from paceline.bench.near_ties import bugs_in, compare, summary
from paceline.bench.sampling_test import SampleLimit, SamplingAudit, SamplingResult, slow_to_draw
from paceline.bench.statistics import detectable_distance
from paceline.config import NONE
from paceline.core.verify import RULES

LOSSLESS_RULES = tuple(name for name, rule in RULES.items() if rule.lossless)
DEFAULT_ALPHA = 0.001
Generate = Callable[[list[int]], list[int]]  # prompt -> greedy output
ReferenceGenerate = Callable[[list[int], OutputLength], list[int]]


class CheckStatus(Enum):
    PASSED = "passed"
    FAILED = "FAILED"
    UNTESTED = "untested"  # no draft token was ever verified, so nothing was shown


@dataclass(frozen=True, slots=True)
class AuditCheck:
    """The result of one check. distance: the total variation found with 95% certainty."""

    name: str
    kind: str
    status: CheckStatus
    detail: str
    seconds: float
    p_value: float | None = None
    draws: int | None = None
    distance: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "status": self.status.value}


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """What to check, and how thoroughly.

    contexts    to draw from; prompts: to generate greedily
    seconds     for all sampled checks together
    reference   transformers' greedy output, where there is one
    every_pair  False: each method with the first rule, and each further rule with the first method
    """

    contexts: list[list[int]]
    prompts: list[list[int]]
    methods: list[str]
    rules: tuple[str, ...] = LOSSLESS_RULES
    temperatures: tuple[float, ...] = (0.7, 1.0)
    num_draft_tokens: int = 2
    length: OutputLength = field(default_factory=OutputLength)
    alpha: float = DEFAULT_ALPHA
    draws: int = 2000
    seconds: float = 600.0
    seed: int = 0
    reference: ReferenceGenerate | None = None
    describe: Callable[[list[int]], str] = str
    every_pair: bool = True

    def sampled_settings(self) -> list[DecodeSetting]:
        """A rule does not depend on who drafted, so a quick audit need not try every rule with every method."""
        pairs = [(method, rule) for method in self.methods for rule in self.rules]
        if not self.every_pair:
            pairs = [(m, r) for m, r in pairs if m == self.methods[0] or r == self.rules[0]]
        temperatures = [temperature for temperature in self.temperatures if temperature > 0]
        return [
            DecodeSetting(method, self.num_draft_tokens, temperature, rule)
            for temperature in temperatures
            for method, rule in pairs
        ]


@dataclass(frozen=True, slots=True)
class AuditResult:
    """All checks. `lossless` only if nothing failed and something was shown."""

    checks: list[AuditCheck]
    alpha: float

    @property
    def failed(self) -> list[AuditCheck]:
        return [check for check in self.checks if check.status is CheckStatus.FAILED]

    @property
    def lossless(self) -> bool:
        return not self.failed and any(check.status is CheckStatus.PASSED for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return {
            "lossless": self.lossless,
            "alpha": self.alpha,
            "failed": [check.name for check in self.failed],
            "checks": [check.as_dict() for check in self.checks],
        }


def audit(candidates: Candidates, plan: AuditPlan) -> Iterator[AuditCheck]:
    """Run every check, yielding each as it is done."""
    yield from greedy_checks(candidates, plan)
    yield from sampled_checks(candidates, plan)


# --- greedy -----------------------------------------------------------------------------------------------------------


def greedy_checks(candidates: Candidates, plan: AuditPlan) -> Iterator[AuditCheck]:
    """Every method against plain decoding, and plain decoding against transformers."""
    if not plan.prompts:
        return
    plain = [*map(_greedy(candidates, DecodeSetting(NONE), plan.length), plan.prompts)]
    if plan.reference is not None:
        reference: Generate = partial(_with_length, plan.reference, plan.length)
        yield _compared(candidates, plan, plain, "plain = transformers", reference)
    for method in plan.methods:
        generate = _greedy(candidates, DecodeSetting(method, plan.num_draft_tokens), plan.length)
        yield _compared(candidates, plan, plain, f"greedy {method} = plain", generate)


def _greedy(candidates: Candidates, setting: DecodeSetting, length: OutputLength) -> Generate:
    engine = MeasuredEngine(candidates.engine(setting))
    return lambda prompt: engine.run([prompt], length).outputs[0]


def _with_length(reference: ReferenceGenerate, length: OutputLength, prompt: list[int]) -> list[int]:
    return reference(prompt, length)


def _compared(
    candidates: Candidates, plan: AuditPlan, plain: list[list[int]], name: str, generate: Generate
) -> AuditCheck:
    started = time.perf_counter()
    comparisons = [
        compare(candidates.target, prompt, output, generate(prompt)) for prompt, output in zip(plan.prompts, plain)
    ]
    status = CheckStatus.FAILED if bugs_in(comparisons) else CheckStatus.PASSED
    return AuditCheck(name, "greedy", status, summary(comparisons), time.perf_counter() - started)


# --- sampled ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _SampledCheck:
    """One setting in one context. context: its index in the plan."""

    setting: DecodeSetting
    context: int


def sampled_checks(candidates: Candidates, plan: AuditPlan) -> Iterator[AuditCheck]:
    """Every setting in every context, the time divided evenly."""
    sampling_audit = SamplingAudit(candidates)
    checks = [
        _SampledCheck(setting, context) for setting in plan.sampled_settings() for context in range(len(plan.contexts))
    ]
    # The cheap ones first: time that they do not need goes to the others.
    checks.sort(key=lambda check: slow_to_draw(candidates.candidate(check.setting.method).drafter))
    threshold = plan.alpha / max(len(checks), 1)
    began = time.perf_counter()
    for number, check in enumerate(checks):
        started = time.perf_counter()
        remaining = max(0.0, plan.seconds - (started - began))
        limit = SampleLimit(plan.draws, remaining / (len(checks) - number))
        context = plan.contexts[check.context]
        result = sampling_audit.test(check.setting, context, limit, plan.seed + number, plan.describe)
        name = f"sampled {check.setting}" + (f" context {check.context + 1}" if len(plan.contexts) > 1 else "")
        yield sampled_check(name, result, threshold, time.perf_counter() - started)


def sampled_check(name: str, result: SamplingResult, threshold: float, seconds: float) -> AuditCheck:
    """Accept or reject at one test's share of alpha."""
    fit = result.fit
    distance = detectable_distance(fit.draws, fit.degrees_of_freedom, threshold)
    if fit.p_value < threshold:
        status, detail = CheckStatus.FAILED, f"p = {fit.p_value:.2g}: {result.furthest}"
    elif not result.stats.drafted:
        status, detail = CheckStatus.UNTESTED, "the method drafted nothing in this context"
    else:
        status = CheckStatus.PASSED
        detail = (
            f"p = {fit.p_value:.2g} over {fit.draws} draws, {result.stats.drafted} draft tokens verified, "
            f"{result.stats.accepted} accepted; a distance of {distance:.3f} would be found with 95% certainty"
        )
    return AuditCheck(name, "sampled", status, detail, seconds, fit.p_value, fit.draws, distance)
