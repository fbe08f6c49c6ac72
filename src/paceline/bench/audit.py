"""Proof that the output is unchanged, on the user's own models.

greedy   every method's output against plain decoding, and that against transformers; differences are explained
sampled  for every method, acceptance rule and temperature: draws against the target's exact distribution

Every sampled check is a chi² test. All of them together raise a false alarm with probability `alpha`; each states how
far the output would have to be off to be found with 95% certainty. A check that would not have found the required
distance shows nothing, whatever its p-value.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.bench.candidates import Candidates, DecodeSetting
from paceline.bench.measure import MeasuredEngine, OutputLength
from paceline.bench.near_ties import GreedyComparison, bugs_in, compare, summary
from paceline.bench.outcome import Evidence, Outcome, strongest, weakest
from paceline.bench.sampling_test import SampleLimit, SamplingAudit, SamplingResult, slow_to_draw
from paceline.bench.statistics import detectable_distance
from paceline.config import NONE
from paceline.core.verify import RULES

LOSSLESS_RULES = tuple(name for name, rule in RULES.items() if rule.lossless)
DEFAULT_ALPHA = 0.001
ReferenceGenerate = Callable[[list[int], OutputLength], list[int]]


@dataclass(frozen=True, slots=True)
class AuditCheck:
    """The result of one check.

    subject   what the check is about: several contexts may put one setting to the test
    distance  the total variation found with 95% certainty
    """

    name: str
    kind: str
    outcome: Outcome
    detail: str
    seconds: float
    p_value: float | None = None
    draws: int | None = None
    distance: float | None = None
    subject: str = ""

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "outcome": self.outcome.value}


@dataclass(frozen=True, slots=True)
class AuditPlan:
    """What to check, and how thoroughly.

    contexts    to draw from; prompts: to generate greedily
    seconds     of drawing, for all sampled checks together
    reference   transformers' greedy output, where there is one
    every_pair  False: each method with the first rule, and each further rule with the first method
    evidence    what a sampled check needs before it says lossless
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
    evidence: Evidence = field(default_factory=Evidence)

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
    """All checks, and what they show together."""

    checks: list[AuditCheck]
    alpha: float

    @property
    def outcome(self) -> Outcome:
        """Lossless only if nothing differs and every subject was shown at least once."""
        return weakest(self._by_subject().values())

    @property
    def lossless(self) -> bool:
        return self.outcome is Outcome.LOSSLESS

    @property
    def different(self) -> list[AuditCheck]:
        return [check for check in self.checks if check.outcome is Outcome.DIFFERENT]

    @property
    def not_shown(self) -> list[str]:
        """Subjects that no check has shown to be lossless or different."""
        return [subject for subject, outcome in self._by_subject().items() if outcome is Outcome.NOT_SHOWN]

    @property
    def distance(self) -> float | None:
        """The smallest total variation that would have been found in every subject; None without sampled checks."""
        found: dict[str, float] = {}
        for check in self.checks:
            if check.outcome is Outcome.LOSSLESS and check.distance is not None:
                found[check.subject] = min(check.distance, found.get(check.subject, 1.0))
        return max(found.values(), default=None)

    def _by_subject(self) -> dict[str, Outcome]:
        outcomes: dict[str, list[Outcome]] = {}
        for check in self.checks:
            outcomes.setdefault(check.subject or check.name, []).append(check.outcome)
        return {subject: strongest(tries) for subject, tries in outcomes.items()}

    def as_dict(self) -> dict[str, Any]:
        return {
            "outcome": self.outcome.value,
            "lossless": self.lossless,
            "alpha": self.alpha,
            "distance": self.distance,
            "different": [check.name for check in self.different],
            "not_shown": self.not_shown,
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
    plain = _greedy(candidates, DecodeSetting(NONE), plan).outputs
    if plan.reference is not None:
        started = time.perf_counter()
        outputs = [plan.reference(prompt, plan.length) for prompt in plan.prompts]
        comparisons = _comparisons(candidates, plan, plain, outputs)
        yield _greedy_check("plain = transformers", comparisons, time.perf_counter() - started)
    for method in plan.methods:
        started = time.perf_counter()
        run = _greedy(candidates, DecodeSetting(method, plan.num_draft_tokens), plan)
        comparisons = _comparisons(candidates, plan, plain, run.outputs)
        seconds = time.perf_counter() - started
        yield _greedy_check(f"greedy {method} = plain", comparisons, seconds, has_drafts=run.has_drafts)


@dataclass(frozen=True, slots=True)
class _GreedyRun:
    """The outputs of one setting. has_drafts: the target verified at least one draft token."""

    outputs: list[list[int]]
    has_drafts: bool


def _greedy(candidates: Candidates, setting: DecodeSetting, plan: AuditPlan) -> _GreedyRun:
    engine = MeasuredEngine(candidates.engine(setting))
    runs = [engine.run([prompt], plan.length) for prompt in plan.prompts]
    return _GreedyRun([run.outputs[0] for run in runs], any(run.stats.drafted for run in runs))


def _comparisons(
    candidates: Candidates, plan: AuditPlan, plain: list[list[int]], outputs: list[list[int]]
) -> list[GreedyComparison]:
    return [compare(candidates.target, *row) for row in zip(plan.prompts, plain, outputs)]


def _greedy_check(
    name: str, comparisons: list[GreedyComparison], seconds: float, *, has_drafts: bool = True
) -> AuditCheck:
    outcome, detail = Outcome.LOSSLESS, summary(comparisons)
    if bugs_in(comparisons):
        outcome = Outcome.DIFFERENT
    elif not has_drafts:
        outcome, detail = Outcome.NOT_SHOWN, f"{detail}, but the method drafted nothing"
    return AuditCheck(name, "greedy", outcome, detail, seconds)


# --- sampled ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _SampledCheck:
    """One setting in one context. context: its index in the plan."""

    setting: DecodeSetting
    context: int


def sampled_checks(candidates: Candidates, plan: AuditPlan) -> Iterator[AuditCheck]:
    """Every setting in every context, the time divided evenly. Only drawing counts, not the building of engines."""
    sampling_audit = SamplingAudit(candidates)
    checks = [
        _SampledCheck(setting, context) for setting in plan.sampled_settings() for context in range(len(plan.contexts))
    ]
    # The cheap ones first: time that they do not need goes to the others.
    checks.sort(key=lambda check: slow_to_draw(candidates.candidate(check.setting.method).drafter))
    threshold = plan.alpha / max(len(checks), 1)
    remaining = plan.seconds
    for number, check in enumerate(checks):
        started = time.perf_counter()
        limit = SampleLimit(plan.draws, remaining / (len(checks) - number))
        context = plan.contexts[check.context]
        result = sampling_audit.test(check.setting, context, limit, plan.seed + number, plan.describe)
        remaining = max(0.0, remaining - result.seconds)
        name = f"sampled {check.setting}" + (f" context {check.context + 1}" if len(plan.contexts) > 1 else "")
        conclusion = sampled_conclusion(check.setting, result, threshold, plan.evidence)
        yield _sampled_check(name, check.setting, result, conclusion, time.perf_counter() - started)


@dataclass(frozen=True, slots=True)
class Conclusion:
    """What one sampled test shows, and why. distance: the total variation found with 95% certainty."""

    outcome: Outcome
    detail: str
    distance: float


def sampled_conclusion(
    setting: DecodeSetting, result: SamplingResult, threshold: float, evidence: Evidence
) -> Conclusion:
    """At one test's share of alpha: different below it, lossless above it with enough evidence, else not shown."""
    fit = result.fit
    distance = detectable_distance(fit.draws, fit.degrees_of_freedom, threshold)
    if fit.p_value < threshold:
        return Conclusion(Outcome.DIFFERENT, f"p = {fit.p_value:.2g}: {result.furthest}", distance)
    if missing := _missing(setting, result, evidence.missing(fit.draws, distance)):
        return Conclusion(Outcome.NOT_SHOWN, missing, distance)
    detail = (
        f"p = {fit.p_value:.2g} over {fit.draws} draws, {result.stats.drafted} draft tokens verified, "
        f"{result.stats.accepted} accepted; a distance of {distance:.3f} between the {fit.num_cells} groups of "
        "outputs would be found with 95% certainty"
    )
    return Conclusion(Outcome.LOSSLESS, detail, distance)


def _missing(setting: DecodeSetting, result: SamplingResult, shortfall: str | None) -> str | None:
    """Why a test without a finding shows nothing; None where it shows something."""
    if not result.stats.drafted:
        return "the method drafted nothing in this context"
    if setting.acceptance not in LOSSLESS_RULES:
        return f"no difference in {result.fit.draws} draws, but {setting.acceptance} is not an exact rule"
    if shortfall is None and result.fit.num_cells < 2:
        return "only one output can follow this context"
    return shortfall


def _sampled_check(
    name: str, setting: DecodeSetting, result: SamplingResult, conclusion: Conclusion, seconds: float
) -> AuditCheck:
    return AuditCheck(
        name,
        "sampled",
        conclusion.outcome,
        conclusion.detail,
        seconds,
        result.fit.p_value,
        result.fit.draws,
        conclusion.distance,
        f"sampled {setting}",
    )
