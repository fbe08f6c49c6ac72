"""From measurements to the record that results.json, the table and the report are made from.

docs/results.schema.json describes the record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from paceline.bench.candidates import Setting, Subject
from paceline.bench.measure import Written, added
from paceline.bench.near_ties import Comparison, Kind, compare
from paceline.bench.sampling_test import LENGTH, Effort, SamplingAudit
from paceline.bench.speedup_model import Answers, habits_of, observed_curve
from paceline.bench.statistics import Spread
from paceline.bench.sweep import Measured, SweepPlan
from paceline.core.cost_model import CostCurve
from paceline.core.stats import SpecStats

RUNNING_STEP = 8  # tokens of an answer in one point of the running acceptance line
SAMPLED_ALPHA = 1e-4


@dataclass(frozen=True, slots=True)
class Lossless:
    """Whether the output was still the target's. Without it no speed-up is stated."""

    passed: bool
    detail: str


@dataclass(slots=True)
class Collected:
    """Everything measured so far, by the name of the setting. Filled as the sweep runs, also when it is cut short."""

    plan: SweepPlan
    by_name: dict[str, list[Measured]] = field(default_factory=dict)

    def add(self, measured: Measured) -> None:
        self.by_name.setdefault(measured.name, []).append(measured)

    def writes(self, name: str) -> list[Written]:
        return [one.written for one in self.by_name[name]]

    def baseline(self, setting: Setting) -> str:
        return str(setting.baseline)

    def repeats(self, name: str) -> dict[int, list[Measured]]:
        """Only repeats in which every task was measured: an interrupted one would compare unlike texts."""
        grouped: dict[int, list[Measured]] = {}
        for one in self.by_name.get(name, []):
            grouped.setdefault(one.repeat, []).append(one)
        whole = {repeat: runs for repeat, runs in grouped.items() if len(runs) == len(self.plan.tasks)}
        return whole or grouped


def rates_by_repeat(collected: Collected, name: str) -> dict[int, float]:
    """Tokens per second of each repeat: all tokens over all seconds."""
    found = collected.repeats(name).items()
    return {repeat: added([one.written for one in runs]).tokens_per_second for repeat, runs in found}


def speedups(collected: Collected, name: str, baseline: str, domain: str | None = None) -> list[float]:
    """Of each repeat against plain decoding in the same repeat, on the tasks that both have done."""
    ours, plain = collected.repeats(name), collected.repeats(baseline)
    found: list[float] = []
    for repeat in ours.keys() & plain.keys():
        mine, theirs = ({one.task: one.written for one in runs[repeat]} for runs in (ours, plain))
        tasks = [task for task in mine.keys() & theirs.keys() if domain in (None, collected.plan.tasks[task].domain)]
        if tasks:
            fast, slow = (added([side[task] for task in tasks]).tokens_per_second for side in (mine, theirs))
            found.append(fast / slow)
    return found


class LosslessCheck:
    """Looks at every setting once; sampled settings are put to a short audit."""

    def __init__(self, subject: Subject, effort: Effort | None = None) -> None:
        self._subject, self._effort = subject, effort or Effort(draws=400, seconds=6.0)
        self._laboratory: SamplingAudit | None = None
        self._known: dict[Setting, Lossless] = {}

    def __call__(self, collected: Collected, name: str) -> Lossless:
        first = collected.by_name[name][0]
        if first.setting.plain:
            return Lossless(True, "plain decoding itself")
        if first.setting.temperature == 0:
            return self._greedy(collected, name)
        if first.peer:
            return Lossless(True, "sampled texts of a peer are not compared")
        return self._sampled(first.setting, collected.plan.tasks[0].prompts[0])

    def _greedy(self, collected: Collected, name: str) -> Lossless:
        found: list[Comparison] = []
        plain = {one.task: one.written for one in collected.by_name.get(str(Setting("none")), []) if one.repeat == 0}
        for one in collected.by_name[name]:
            if one.repeat == 0 and one.task in plain:
                prompts = collected.plan.tasks[one.task].prompts
                for ids, ours, theirs in zip(prompts, plain[one.task].answers, one.written.answers):
                    found.append(compare(self._subject.target, ids, ours, theirs))
        return _summed(found)

    def _sampled(self, setting: Setting, prompt: list[int]) -> Lossless:
        if self._laboratory is None:
            self._laboratory = SamplingAudit(self._subject)
        context = repeating(prompt[-12:])
        # The texts drawn are short: more guesses than that are never asked for.
        k = min(setting.num_draft_tokens, LENGTH - 1) if isinstance(setting.num_draft_tokens, int) else LENGTH - 1
        tried = Setting(setting.method, k, setting.temperature, setting.acceptance)
        if tried not in self._known:
            fit = self._laboratory.fit(tried, context, self._effort).fit
            detail = f"{fit.draws} draws against the exact distribution: p = {fit.p_value:.2g}"
            self._known[tried] = Lossless(fit.p_value >= SAMPLED_ALPHA, detail)
        return self._known[tried]


def repeating(ids: list[int]) -> list[int]:
    """A context whose end stood before, so that methods that look back have something to find."""
    return ids + ids[: max(2, min(4, len(ids) - 1))]


def _summed(found: list[Comparison]) -> Lossless:
    kinds = [one.kind for one in found]
    bugs = [one for one in found if one.kind is Kind.BUG]
    detail = f"{kinds.count(Kind.SAME)} of {len(found)} texts equal"
    detail += f", {kinds.count(Kind.NEAR_TIE)} part at a near-tie" if Kind.NEAR_TIE in kinds else ""
    detail += f"; {bugs[0]}" if bugs else ""
    return Lossless(not bugs, detail)


def setting_record(
    collected: Collected, name: str, lossless: Callable[[Collected, str], Lossless], verify: CostCurve
) -> dict[str, Any]:
    """One entry of `settings` in results.json."""
    first, runs = collected.by_name[name][0], collected.writes(name)
    setting, total, verified = first.setting, added(runs), lossless(collected, name)
    baseline = collected.baseline(setting)
    gains = [] if name == baseline or not verified.passed else speedups(collected, name, baseline)
    rates = list(rates_by_repeat(collected, name).values())
    return {
        "name": name,
        "method": setting.method,
        "peer": first.peer,
        "num_draft_tokens": setting.num_draft_tokens,
        "temperature": setting.temperature,
        "acceptance": setting.acceptance,
        "tokens_per_second": _spread(rates) | {"repeats": rates},
        "speedup": _spread(gains) if gains else None,
        "lossless": {"passed": verified.passed, "detail": verified.detail},
        "tally": total.as_dict(),
        "by_domain": _by_domain(collected, name, baseline, verified.passed),
        "running_acceptance": _running(runs),
        "time": _time(runs, total),
        "predicted_speedup": _predicted(collected, name, verify) if gains and not first.peer else None,
    }


def _spread(values: list[float]) -> dict[str, Any]:
    spread = Spread.of(values)
    return {"median": spread.median, "low": spread.low, "high": spread.high}


def _by_domain(collected: Collected, name: str, baseline: str, lossless: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for domain in dict.fromkeys(task.domain for task in collected.plan.tasks):
        mine = [one.written for one in collected.by_name[name] if collected.plan.tasks[one.task].domain == domain]
        if not mine:
            continue
        total = added(mine)
        gains = speedups(collected, name, baseline, domain) if lossless and name != baseline else []
        found[domain] = {
            "tokens_per_second": total.tokens_per_second,
            "acceptance_rate": total.acceptance_rate,
            "tokens_per_step": total.tokens_per_step,
            "speedup": Spread.of(gains).median if gains else None,
        }
    return found


def _running(runs: list[Written]) -> list[dict[str, Any]]:
    """Acceptance over the course of an answer, in steps of a few tokens."""
    offered: dict[int, int] = {}
    accepted: dict[int, int] = {}
    for mark in (mark for written in runs for mark in written.marks):
        step = mark.position // RUNNING_STEP
        offered[step] = offered.get(step, 0) + mark.offered
        accepted[step] = accepted.get(step, 0) + mark.accepted
    return [
        {"position": step * RUNNING_STEP, "offered": offered[step], "accepted": accepted[step]}
        for step in sorted(offered)
    ]


def _time(runs: list[Written], total: SpecStats) -> dict[str, float]:
    """Where the seconds went: guessing, the target's passes with judging, and the rest (prompts, bookkeeping)."""
    return {
        "draft": sum(written.draft_seconds for written in runs),
        "verify": sum(written.verify_seconds for written in runs),
        "other": sum(written.other_seconds for written in runs),
        "total": total.seconds,
    }


def _predicted(collected: Collected, name: str, verify: CostCurve) -> float | None:
    """By the theory, from this setting's acceptance and the cost of passes measured beforehand; fixed k only."""
    setting, runs = collected.by_name[name][0].setting, collected.writes(name)
    k, plain = setting.num_draft_tokens, collected.writes(collected.baseline(setting))
    if not isinstance(k, int) or not k:
        return None
    answers = answers_of(plain, verify)
    habits = habits_of(runs, k, answers.verify)
    return answers.speedup(habits, k, CostCurve({k: habits.draft}))


def answers_of(plain: list[Written], verify: CostCurve) -> Answers:
    """What answers cost without guessing, from texts written plainly."""
    texts = max(len(written.answers) for written in plain)
    return Answers(
        fmean(written.stats.new_tokens for written in plain),
        fmean(written.other_seconds for written in plain),
        observed_curve(verify, plain),
        texts,
    )
