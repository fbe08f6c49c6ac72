"""What theory predicts for a setting, from what was counted and what passes cost.

Tokens per step come from acceptance by position (plan.predict holds the formula). Lookup methods do not draft in every
step, and trees spend several draft tokens on one depth; predictions weigh both by the measured behaviour of the method.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median

from paceline.bench.measure import BatchRun, StepRecord
from paceline.core.cost_model import CostCurve, StepTiming
from paceline.plan.predict import tokens_per_step_by_position

LEAST_TIMINGS = 5  # of one width, before their median replaces a measurement


@dataclass(frozen=True, slots=True)
class DraftBehaviour:
    """How a method behaves on a workload when `k` draft tokens are asked for.

    rates          by depth: how often a draft token is accepted, of the steps in which all before it were
    draft_share    the share of steps in which it drafts at all
    fill           draft tokens made of those asked for, in steps with a draft
    depth          depths that a draft token adds: 1 in a chain, less in a tree
    draft_seconds  of drafting per step
    start_seconds  of drafting once per sequence, before its first draft token
    """

    k: int
    rates: list[float]
    draft_share: float
    fill: float
    depth: float
    draft_seconds: float
    start_seconds: float = 0.0

    def tokens_per_step(self, k: int) -> float:
        """Expected tokens of a step that asks for k draft tokens; a part of a depth counts in part."""
        reach = k * self.fill * self.depth
        whole = int(reach)
        rates = [self.rates[min(depth, len(self.rates) - 1)] if self.rates else 0.0 for depth in range(whole + 1)]
        low, high = tokens_per_step_by_position(rates[:whole]), tokens_per_step_by_position(rates)
        return 1.0 + self.draft_share * (low + (reach - whole) * (high - low) - 1.0)

    def verify_seconds(self, k: int, verify: CostCurve, num_seqs: int = 1) -> float:
        """The target's pass of an average step; `verify` is by the tokens in a pass."""
        with_drafts = verify.at(num_seqs * (1 + max(1, round(k * self.fill))))
        return self.draft_share * with_drafts + (1 - self.draft_share) * verify.at(num_seqs)


@dataclass(frozen=True, slots=True)
class PlainCost:
    """What plain decoding costs: tokens of an output, seconds around its steps, the pass by its width."""

    num_tokens: float
    other_seconds: float
    verify: CostCurve
    num_seqs: int = 1

    @property
    def plain_seconds(self) -> float:
        return self.other_seconds + self.num_tokens / self.num_seqs * self.verify.at(self.num_seqs)

    def seconds(self, behaviour: DraftBehaviour, k: int, draft: CostCurve) -> float:
        """Seconds of an output generated with k draft tokens a step."""
        steps = self.num_tokens / self.num_seqs / behaviour.tokens_per_step(k)
        step_seconds = behaviour.verify_seconds(k, self.verify, self.num_seqs) + draft.at(k)
        return self.other_seconds + behaviour.start_seconds + steps * step_seconds

    def speedup(self, behaviour: DraftBehaviour, k: int, draft: CostCurve) -> float:
        return self.plain_seconds / self.seconds(behaviour, k, draft)

    def shortest_output(self, behaviour: DraftBehaviour, k: int, draft: CostCurve) -> int:
        """Tokens an output needs before it pays for what drafting costs once; 0 where it costs nothing once."""
        step_seconds = behaviour.verify_seconds(k, self.verify, self.num_seqs) + draft.at(k)
        saved = self.verify.at(self.num_seqs) - step_seconds / behaviour.tokens_per_step(k)
        saved_per_token = saved / self.num_seqs
        if saved_per_token <= 0 or behaviour.start_seconds <= 0:
            return 0
        return int(behaviour.start_seconds / saved_per_token) + 1


def plain_cost(plain: list[BatchRun], verify: CostCurve) -> PlainCost:
    """What plain decoding costs, from outputs generated without drafts."""
    return PlainCost(
        fmean(run.stats.new_tokens for run in plain),
        fmean(run.other_seconds for run in plain),
        observed_curve(verify, plain),
        max(len(run.outputs) for run in plain),
    )


def behaviour_of(runs: list[BatchRun], k: int, verify: CostCurve) -> DraftBehaviour:
    """How a method behaves, from runs with a fixed k; `verify` is what plain passes cost."""
    steps = [step for run in runs for step in run.steps]
    drafting = [step for step in steps if step.num_draft_tokens]
    drafted = sum(step.num_draft_tokens for step in drafting)
    return DraftBehaviour(
        k,
        conditional_rates(drafting),
        len(drafting) / len(steps) if steps else 0.0,
        drafted / (k * len(drafting)) if drafting and k else 1.0,
        sum(step.depth for step in drafting) / drafted if drafted else 1.0,
        _step_draft_seconds(runs, verify),
        _start_draft_seconds(runs, verify),
    )


def conditional_rates(steps: Iterable[StepRecord]) -> list[float]:
    """By depth: accepted there, of the steps that reached it with a draft token to verify."""
    tried: list[int] = []
    accepted: list[int] = []
    for step in steps:
        for depth in range(min(step.depth, step.accepted + 1)):
            if depth == len(tried):
                tried.append(0)
                accepted.append(0)
            tried[depth] += 1
            accepted[depth] += depth < step.accepted
    return [good / total for good, total in zip(accepted, tried)]


def observed_curve(measured: CostCurve, runs: list[BatchRun]) -> CostCurve:
    """A cost curve measured on an idle machine, corrected by the passes of real sequences.

    Real sequences are longer, so their passes cost a little more. Widths with enough timings take their median; the
    others are scaled as the nearest of these is.
    """
    seconds_by_width: dict[int, list[float]] = {}
    for timing in (timing for run in runs for timing in run.timings):
        seconds_by_width.setdefault(timing.nodes, []).append(timing.verify_seconds)
    observed = {width: median(times) for width, times in seconds_by_width.items() if len(times) >= LEAST_TIMINGS}
    if not observed:
        return measured
    scaled = {
        width: seconds * observed[nearest] / measured.at(nearest)
        for width, seconds in measured.as_dict().items()
        for nearest in [min(observed, key=lambda other: abs(other - width))]
    }
    return CostCurve({**scaled, **observed})


def _step_draft_seconds(runs: list[BatchRun], verify: CostCurve) -> float:
    """Seconds of drafting per step, without each sequence's first, in which the prompt is read too."""
    later = [_draft_seconds(run, timing, verify) for run in runs for timing in run.timings[1:]]
    return fmean(later) if later else 0.0


def _start_draft_seconds(runs: list[BatchRun], verify: CostCurve) -> float:
    """What drafting in the first step of a sequence costs beyond the others."""
    first = [_draft_seconds(run, run.timings[0], verify) for run in runs if run.timings]
    return max(0.0, fmean(first) - _step_draft_seconds(runs, verify)) if first else 0.0


def _draft_seconds(run: BatchRun, timing: StepTiming, verify: CostCurve) -> float:
    """Seconds of a step spent on drafting. Where the host does not see them: what the step took beyond a pass."""
    if not run.drafts_unseen:
        return timing.draft_seconds
    return max(timing.draft_seconds, timing.seconds - verify.at(timing.nodes))
