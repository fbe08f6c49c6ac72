"""From measurements to the record that results.json, the table and the report are made from.

docs/results.schema.json describes the record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from paceline.bench.audit import LOSSLESS_RULES, sampled_conclusion
from paceline.bench.candidates import Candidates, DecodeSetting
from paceline.bench.compare import exceeds_tokens_per_step, noise
from paceline.bench.measure import BatchRun, total_stats
from paceline.bench.near_ties import GreedyComparison, bugs_in, compare, summary
from paceline.bench.outcome import Evidence, Outcome
from paceline.bench.sampling_test import NUM_TOKENS, SampleLimit, SamplingAudit
from paceline.bench.speedup_model import behaviour_of, plain_cost
from paceline.bench.statistics import Spread
from paceline.bench.sweep import SettingRun, SweepPlan
from paceline.core.cost_model import CostCurve
from paceline.core.stats import SpecStats

POSITIONS_PER_POINT = 8  # output tokens in one point of the running acceptance
SAMPLED_ALPHA = 1e-4
CONTEXT_TOKENS = 12  # of a prompt, that a short audit draws from


@dataclass(frozen=True, slots=True)
class LosslessResult:
    """Whether the output was still the target's. Only a lossless setting has a speed-up."""

    outcome: Outcome
    detail: str

    @property
    def passed(self) -> bool:
        return self.outcome is Outcome.LOSSLESS

    def as_dict(self) -> dict[str, Any]:
        return {"outcome": self.outcome.value, "passed": self.passed, "detail": self.detail}


@dataclass(slots=True)
class Measurements:
    """Everything measured so far, by the name of the setting. Filled as the sweep runs, also when it is interrupted."""

    plan: SweepPlan
    by_name: dict[str, list[SettingRun]] = field(default_factory=dict)

    def add(self, measurement: SettingRun) -> None:
        self.by_name.setdefault(measurement.name, []).append(measurement)

    def runs(self, name: str, domain: str | None = None) -> list[BatchRun]:
        """All runs of a setting, or those of one domain."""
        return [item.run for item in self.by_name[name] if domain in (None, self.domain(item))]

    def domain(self, measurement: SettingRun) -> str:
        return self.plan.batches[measurement.batch].domain

    def repeats(self, name: str) -> dict[int, list[SettingRun]]:
        """Only repeats in which every batch was measured: an interrupted one would compare different prompts."""
        grouped: dict[int, list[SettingRun]] = {}
        for measurement in self.by_name.get(name, []):
            grouped.setdefault(measurement.repeat, []).append(measurement)
        complete = {repeat: items for repeat, items in grouped.items() if len(items) == len(self.plan.batches)}
        return complete or grouped


def rates_by_repeat(measurements: Measurements, name: str) -> list[float]:
    """Tokens per second of each repeat: all tokens over all seconds."""
    repeats = measurements.repeats(name).values()
    return [total_stats([item.run for item in items]).tokens_per_second for items in repeats]


def speedups(measurements: Measurements, name: str, plain: str, domain: str | None = None) -> list[float]:
    """Of each repeat against plain decoding in the same repeat, on the batches that both have done."""
    own, reference = measurements.repeats(name), measurements.repeats(plain)
    ratios: list[float] = []
    for repeat in own.keys() & reference.keys():
        fast, slow = (
            {item.batch: item.run for item in side[repeat] if domain in (None, measurements.domain(item))}
            for side in (own, reference)
        )
        if batches := fast.keys() & slow.keys():
            rates = [total_stats([side[batch] for batch in batches]).tokens_per_second for side in (fast, slow)]
            ratios.append(rates[0] / rates[1])
    return ratios


# --- is it lossless? --------------------------------------------------------------------------------------------------


class LosslessCheck:
    """Checks every setting once; sampled settings go through a short audit."""

    def __init__(self, candidates: Candidates, limit: SampleLimit | None = None) -> None:
        self._candidates, self._limit = candidates, limit or SampleLimit(draws=800, seconds=10.0)
        self._audit: SamplingAudit | None = None
        self._results: dict[DecodeSetting, LosslessResult] = {}

    def __call__(self, measurements: Measurements, name: str) -> LosslessResult:
        first = measurements.by_name[name][0]
        if first.setting.is_plain:
            return LosslessResult(Outcome.LOSSLESS, "plain decoding itself")
        if first.setting.temperature == 0:
            return self._greedy(measurements, name)
        if first.is_baseline:
            return LosslessResult(Outcome.NOT_SHOWN, "sampled outputs of a baseline are not compared")
        return self._sampled(first.setting, measurements.plan.batches[0].prompts[0])

    def _greedy(self, measurements: Measurements, name: str) -> LosslessResult:
        plain = measurements.by_name.get(str(DecodeSetting("none")), [])
        reference = {item.batch: item.run.outputs for item in plain if item.repeat == 0}
        comparisons: list[GreedyComparison] = []
        for item in measurements.by_name[name]:
            if item.repeat == 0 and item.batch in reference:
                prompts = measurements.plan.batches[item.batch].prompts
                outputs = zip(prompts, reference[item.batch], item.run.outputs)
                comparisons += [compare(self._candidates.target, *row) for row in outputs]
        return greedy_result(comparisons, measurements.by_name[name][0].setting.acceptance)

    def _sampled(self, setting: DecodeSetting, prompt: list[int]) -> LosslessResult:
        # The sequences drawn are short: more draft tokens than that are never made.
        k = setting.num_draft_tokens
        k = min(k, NUM_TOKENS - 1) if isinstance(k, int) else NUM_TOKENS - 1
        short = DecodeSetting(setting.method, k, setting.temperature, setting.acceptance)
        if short not in self._results:
            self._audit = self._audit or SamplingAudit(self._candidates)
            result = self._audit.test(short, repeating(prompt[-CONTEXT_TOKENS:]), self._limit)
            conclusion = sampled_conclusion(short, result, SAMPLED_ALPHA, Evidence())
            detail = f"against the exact distribution: {conclusion.detail}"
            self._results[short] = LosslessResult(conclusion.outcome, detail)
        return self._results[short]


def greedy_result(comparisons: list[GreedyComparison], acceptance: str) -> LosslessResult:
    """Equal outputs of a few prompts do not make a rule exact that is lossy by its own name."""
    line = summary(comparisons)
    if bugs_in(comparisons):
        return LosslessResult(Outcome.DIFFERENT, line)
    if not comparisons:
        return LosslessResult(Outcome.NOT_SHOWN, "no output of plain decoding to compare with")
    if acceptance not in LOSSLESS_RULES:
        return LosslessResult(Outcome.NOT_SHOWN, f"{line}, but {acceptance} is not an exact rule")
    return LosslessResult(Outcome.LOSSLESS, line)


def repeating(prompt: list[int]) -> list[int]:
    """A context whose last tokens occurred before, so that lookup methods find something."""
    return prompt + prompt[: max(2, min(4, len(prompt) - 1))]


# --- the record -------------------------------------------------------------------------------------------------------


def setting_record(
    measurements: Measurements,
    name: str,
    lossless: Callable[[Measurements, str], LosslessResult],
    verify: CostCurve | None,
) -> dict[str, Any]:
    """One entry of `settings` in results.json. verify: None where the cost of passes is not known."""
    first, runs = measurements.by_name[name][0], measurements.runs(name)
    setting, result = first.setting, lossless(measurements, name)
    plain, stats = str(setting.plain), total_stats(runs)
    compared = result.passed and name != plain and (first.is_baseline or setting.num_draft_tokens != 0)
    measured = speedups(measurements, name, plain) if compared else []
    noisy = bool(measured) and not first.is_baseline and _is_noise(measured, stats)
    gains = [] if noisy else measured
    rates = rates_by_repeat(measurements, name)
    return {
        "name": name,
        "method": setting.method,
        "is_baseline": first.is_baseline,
        "num_draft_tokens": setting.num_draft_tokens,
        "temperature": setting.temperature,
        "acceptance": setting.acceptance,
        "tokens_per_second": _spread(rates) | {"repeats": rates},
        "speedup": _spread(gains) if gains else None,
        "noise": noise(Spread.of(measured).median, stats.tokens_per_step) if noisy else None,
        "lossless": result.as_dict(),
        "stats": stats.as_dict(),
        "by_domain": _by_domain(measurements, name, with_speedup=compared),
        "running_acceptance": _running_acceptance(runs),
        "time": _time(runs),
        "predicted_speedup": _predicted(measurements, name, verify)
        if verify is not None and gains and not first.is_baseline
        else None,
    }


def _is_noise(gains: list[float], stats: SpecStats) -> bool:
    return exceeds_tokens_per_step(Spread.of(gains).median, stats.tokens_per_step)


def _spread(values: list[float]) -> dict[str, Any]:
    spread = Spread.of(values)
    return {"median": spread.median, "low": spread.low, "high": spread.high}


def _by_domain(measurements: Measurements, name: str, *, with_speedup: bool) -> dict[str, Any]:
    plain = str(measurements.by_name[name][0].setting.plain)
    is_baseline = measurements.by_name[name][0].is_baseline
    records: dict[str, Any] = {}
    for domain in dict.fromkeys(batch.domain for batch in measurements.plan.batches):
        runs = measurements.runs(name, domain)
        if runs:
            gains, stats = speedups(measurements, name, plain, domain) if with_speedup else [], total_stats(runs)
            noisy = bool(gains) and not is_baseline and _is_noise(gains, stats)
            records[domain] = _domain_record(stats, [] if noisy else gains)
    return records


def _domain_record(stats: SpecStats, gains: list[float]) -> dict[str, Any]:
    return {
        "tokens_per_second": stats.tokens_per_second,
        "acceptance_rate": stats.acceptance_rate,
        "tokens_per_step": stats.tokens_per_step,
        "speedup": Spread.of(gains).median if gains else None,
    }


def _running_acceptance(runs: list[BatchRun]) -> list[dict[str, Any]]:
    """Acceptance over the course of an output, in points of a few tokens."""
    drafted: dict[int, int] = {}
    accepted: dict[int, int] = {}
    for step in (step for run in runs for step in run.steps):
        point = step.position // POSITIONS_PER_POINT
        drafted[point] = drafted.get(point, 0) + step.num_draft_tokens
        accepted[point] = accepted.get(point, 0) + step.accepted
    return [
        {"position": point * POSITIONS_PER_POINT, "drafted": drafted[point], "accepted": accepted[point]}
        for point in sorted(drafted)
    ]


def _time(runs: list[BatchRun]) -> dict[str, float]:
    """Where the seconds went: drafting, the target's passes with verification, and the rest (prefill, scheduling)."""
    return {
        "draft": sum(run.draft_seconds for run in runs),
        "verify": sum(run.verify_seconds for run in runs),
        "other": sum(run.other_seconds for run in runs),
        "total": total_stats(runs).seconds,
    }


def _predicted(measurements: Measurements, name: str, verify: CostCurve) -> float | None:
    """By theory, from this setting's acceptance and the cost of passes measured beforehand; fixed k only."""
    setting = measurements.by_name[name][0].setting
    k = setting.num_draft_tokens
    if not isinstance(k, int) or not k:
        return None
    plain = plain_cost(measurements.runs(str(setting.plain)), verify)
    behaviour = behaviour_of(measurements.runs(name), k, plain.verify)
    return plain.speedup(behaviour, k, CostCurve({k: behaviour.draft_seconds}))
