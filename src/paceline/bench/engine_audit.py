"""audit over an engine as a whole: its outputs with speculation against its own without.

greedy   token by token; a difference is a near-tie by the engine's own log-probabilities, or it is one
sampled  draws of both sides, some with seeds and some without, by the tests of two_samples

The two sides need not be open at the same time: plain decoding is drawn from once, then every method in turn.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.bench.audit import DEFAULT_ALPHA, AuditCheck
from paceline.bench.candidates import DecodeSetting
from paceline.bench.engine_pool import EnginePool
from paceline.bench.engine_ties import compare_outputs
from paceline.bench.measure import OutputLength
from paceline.bench.near_ties import bugs_in, summary
from paceline.bench.outcome import Evidence, Outcome
from paceline.bench.sample_comparison import PairedSamples, conclude
from paceline.config import NONE
from paceline.core.stats import SpecStats
from paceline.errors import PacelineError

CONCURRENCY = 8
DRAWN_TOKENS = 4  # enough for a step with draft tokens after the first token
NO_DRAFTS = "the engine reports no draft tokens"


@dataclass(frozen=True, slots=True)
class EngineAuditPlan:
    """What to check. seconds: of drawing, over both sides of all checks."""

    prompts: list[list[int]]
    methods: list[str]
    temperatures: tuple[float, ...] = (1.0,)
    num_draft_tokens: int = 2
    length: OutputLength = field(default_factory=OutputLength)
    alpha: float = DEFAULT_ALPHA
    draws: int = 400
    seconds: float = 600.0
    seed: int = 0
    acceptance: str = "token"
    evidence: Evidence = field(default_factory=Evidence)

    def setting(self, method: str, temperature: float = 0.0) -> DecodeSetting:
        plain = method == NONE
        rule = "token" if plain else self.acceptance
        return DecodeSetting(method, 0 if plain else self.num_draft_tokens, temperature, rule)


@dataclass(frozen=True, slots=True)
class DrawCase:
    """One sampled check of every method. context: the index of its prompt; seeded: each draw has a seed of its own."""

    temperature: float
    context: int
    seeded: bool

    def __str__(self) -> str:
        return f"context {self.context + 1} {'with seeds' if self.seeded else 'without seeds'}"


@dataclass(slots=True)
class EngineOutputs:
    """What one side generated. stats: of all of it, so that they show whether anything was drafted."""

    greedy: list[list[int]] = field(default_factory=list)
    drawn: dict[DrawCase, Counter[str]] = field(default_factory=dict)
    stats: SpecStats = field(default_factory=SpecStats)
    seconds: float = 0.0


def audit_engine(pool: EnginePool, plan: EngineAuditPlan) -> Iterator[AuditCheck]:
    """Run every check, yielding those of a method together. The pool is left with an engine open."""
    cases = draw_cases(plan)
    limit = plan.seconds / max((1 + len(plan.methods)) * len(cases), 1)
    level = plan.alpha / max(len(plan.methods) * len(cases), 1)
    plain = _outputs(pool, plan, NONE, cases, limit)
    for method in plan.methods:
        try:
            outputs = _outputs(pool, plan, method, cases, limit)
        except PacelineError as error:
            pool.unavailable[method] = str(error)
            continue
        yield from method_checks(pool, plan, method, plain, outputs, level)


def draw_cases(plan: EngineAuditPlan) -> list[DrawCase]:
    return [
        DrawCase(temperature, context, seeded)
        for temperature in plan.temperatures
        if temperature > 0
        for context in range(len(plan.prompts))
        for seeded in (False, True)
    ]


def _outputs(
    pool: EnginePool, plan: EngineAuditPlan, method: str, cases: list[DrawCase], limit: float
) -> EngineOutputs:
    outputs, started = EngineOutputs(), time.perf_counter()
    for prompt in plan.prompts:
        run = pool.run(plan.setting(method), [prompt], plan.length)
        outputs.greedy.append(run.outputs[0])
        outputs.stats.add(run.stats)
    for case in cases:
        setting = plan.setting(method, case.temperature)
        seed = plan.seed + zlib.crc32(f"{setting} {case}".encode()) if case.seeded else None
        outputs.drawn[case] = draw(pool, setting, plan.prompts[case.context], plan.draws, limit, seed, outputs.stats)
    outputs.seconds = time.perf_counter() - started
    return outputs


def draw(
    pool: EnginePool,
    setting: DecodeSetting,
    prompt: list[int],
    draws: int,
    seconds: float,
    seed: int | None,
    stats: SpecStats,
) -> Counter[str]:
    """Short outputs of one prompt. The clock is asked between turns, so what an output is does not decide what counts.

    seed: of the first draw, each further one has the next; None: the engine's own randomness. Counts go to `stats`.
    """
    counts: Counter[str] = Counter()
    started = time.perf_counter()
    while counts.total() < draws and (not counts or time.perf_counter() - started < seconds):
        number = min(CONCURRENCY, draws - counts.total())
        given = {} if seed is None else {"seed": seed + counts.total()}
        results = pool.generate(setting, [prompt] * number, max_new_tokens=DRAWN_TOKENS, **given)
        counts.update(result.text for result in results)
        for result in results:
            stats.add(result.stats)
    return counts


# --- checks -----------------------------------------------------------------------------------------------------------


def method_checks(
    pool: EnginePool, plan: EngineAuditPlan, method: str, plain: EngineOutputs, outputs: EngineOutputs, level: float
) -> Iterator[AuditCheck]:
    """Greedy equality, then every case of sampled outputs."""
    shortfall = None if outputs.stats.drafted else NO_DRAFTS
    yield _greedy_check(pool, plan, method, plain, outputs)
    each = outputs.seconds / max(len(outputs.drawn), 1)
    for case, tested in outputs.drawn.items():
        conclusion = conclude(PairedSamples(tested, plain.drawn[case]), level, plan.evidence, shortfall)
        subject = f"sampled {plan.setting(method, case.temperature)} {'with' if case.seeded else 'without'} seeds"
        yield conclusion.check(f"{subject} context {case.context + 1}", subject, each)


def _greedy_check(
    pool: EnginePool, plan: EngineAuditPlan, method: str, plain: EngineOutputs, outputs: EngineOutputs
) -> AuditCheck:
    started = time.perf_counter()
    comparisons = [compare_outputs(pool, *row) for row in zip(plan.prompts, plain.greedy, outputs.greedy)]
    outcome, detail = Outcome.LOSSLESS, summary(comparisons)
    if bugs_in(comparisons):
        outcome = Outcome.DIFFERENT
    elif not outputs.stats.drafted:
        outcome, detail = Outcome.NOT_SHOWN, f"{detail}, but {NO_DRAFTS}"
    name = f"greedy {plan.setting(method)} = plain"
    return AuditCheck(name, "greedy", outcome, detail, time.perf_counter() - started)
