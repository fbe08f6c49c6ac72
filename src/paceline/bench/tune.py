"""Which method and which k, on this machine, for these prompts: measured, predicted, confirmed.

1. what a pass of the target costs, by width and by batch
2. each method with a small and a large k on a few prompts: acceptance by position, and what drafting costs
3. theory predicts every method and k from that
4. the best predictions are run against plain decoding, in turns, and the fastest is the advice
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from paceline.bench.candidates import Candidates, DecodeSetting
from paceline.bench.compare import exceeds_tokens_per_step, noise
from paceline.bench.measure import BatchRun, MeasuredEngine, OutputLength, total_stats
from paceline.bench.results import Measurements, speedups
from paceline.bench.speedup_model import DraftBehaviour, PlainCost, behaviour_of, observed_curve, plain_cost
from paceline.bench.sweep import WARM_UP, PromptBatch, SweepPlan, sweep
from paceline.config import AUTO, NONE
from paceline.core.cost_model import CostCurve, draft_curve
from paceline.engines.local.warmup import measure_pass

TRIED_KS = (3, 8)
PREDICTED_KS = tuple(range(1, 17))
LEAST_GAIN = 1.03  # below this a measured gain is within the noise of a machine
NUM_CONFIRMED = 2  # predictions that are run
BATCHES_BEFORE_CUT = 2  # then settings far behind plain decoding are dropped: they take longest and promise least
FAR_BEHIND = 0.6  # times plain decoding
PASS_WIDTHS = (1, 2, 3, 4, 5, 7, 9, 13, 17)
PLAIN = DecodeSetting(NONE)
ShowProgress = Callable[[Iterable[Any], str, int], Iterable[Any]]  # runs, a label, how many there are at most


def untracked(items: Iterable[Any], label: str, total: int) -> Iterable[Any]:
    """Shows nothing."""
    return items


@dataclass(frozen=True, slots=True)
class TunePlan:
    """What to tune on. max_num_seqs: prompts whose outputs are generated together, as the user will."""

    prompts: list[list[int]]
    length: OutputLength = field(default_factory=OutputLength)
    temperature: float = 0.0
    max_num_seqs: int = 1
    repeats: int = 2
    seed: int = 0

    def batches(self) -> list[PromptBatch]:
        starts = range(0, len(self.prompts), self.max_num_seqs)
        return [PromptBatch("text", self.prompts[start : start + self.max_num_seqs]) for start in starts]


@dataclass(frozen=True, slots=True)
class SpeedupEstimate:
    """What theory predicts for one setting."""

    method: str
    k: int
    tokens_per_step: float
    speedup: float


@dataclass(frozen=True, slots=True)
class MethodMeasurements:
    """All that was measured of one method."""

    by_k: dict[int, DraftBehaviour]

    def nearest(self, k: int) -> DraftBehaviour:
        return self.by_k[min(self.by_k, key=lambda tried: abs(tried - k))]

    def draft_costs(self) -> CostCurve:
        return draft_curve({k: behaviour.draft_seconds for k, behaviour in self.by_k.items()})


@dataclass(frozen=True, slots=True)
class ConfirmedSpeedup:
    """A prediction, or `auto`, after it was run."""

    method: str
    num_draft_tokens: int | str
    predicted: float | None
    measured: float
    tokens_per_step: float = 0.0

    @property
    def is_noise(self) -> bool:
        return exceeds_tokens_per_step(self.measured, self.tokens_per_step)


@dataclass(frozen=True, slots=True)
class TuneAdvice:
    """What to do, in one sentence and in figures."""

    sentence: str
    method: str
    num_draft_tokens: int | str
    predicted: float | None
    measured: float | None
    shortest_output: int = 0


@dataclass(frozen=True, slots=True)
class TuneResult:
    """The advice, and every figure behind it."""

    advice: TuneAdvice
    estimates: list[SpeedupEstimate]
    confirmed: list[ConfirmedSpeedup]
    verify: CostCurve
    draft: CostCurve


def tune(candidates: Candidates, plan: TunePlan, show: ShowProgress = untracked) -> TuneResult:
    """All four steps. show: passes the runs of a step through and shows how many there are."""
    [verify] = show(_pass_costs(candidates, plan), "step 1 of 3: measuring passes", 1)
    runs = trial_runs(candidates, plan, show)
    verify = observed_curve(verify, runs[PLAIN])
    methods = measured_methods(runs, verify)
    plain = plain_cost(runs[PLAIN], verify)
    estimates = estimate(methods, plain)
    confirmed = confirm(candidates, plan, best_of_each_method(estimates), show)
    advice = advise(estimates, confirmed, methods, plain)
    draft = methods[advice.method].draft_costs() if advice.method in methods else draft_curve()
    return TuneResult(advice, estimates, confirmed, verify, draft)


def _pass_costs(candidates: Candidates, plan: TunePlan) -> Iterator[CostCurve]:
    yield measure_pass(candidates.target, PASS_WIDTHS, num_seqs=plan.max_num_seqs)


# --- trial runs -------------------------------------------------------------------------------------------------------

TrialRuns = dict[DecodeSetting, list[BatchRun]]  # by method and k


@dataclass(frozen=True, slots=True)
class TrialRun:
    """One setting on one batch."""

    setting: DecodeSetting
    run: BatchRun


def trial_runs(candidates: Candidates, plan: TunePlan, show: ShowProgress = untracked) -> TrialRuns:
    """Plain outputs, and every method with a small and a large k. Settings take turns by batch."""
    tried = [DecodeSetting(method, k) for method in candidates.drafting_methods for k in TRIED_KS]
    engines = {setting: MeasuredEngine(candidates.engine(setting, plan.max_num_seqs)) for setting in [PLAIN, *tried]}
    runs: TrialRuns = {setting: [] for setting in engines}
    label = f"step 2 of 3: trying {len(tried)} settings beside plain decoding"
    for trial in show(_trials(engines, plan, runs), label, len(engines) * len(plan.batches())):
        runs[trial.setting].append(trial.run)
    return runs


def _trials(engines: dict[DecodeSetting, MeasuredEngine], plan: TunePlan, runs: TrialRuns) -> Iterator[TrialRun]:
    """Warm up, then run; settings far behind are dropped by what `runs` holds by then."""
    batches = plan.batches()
    for engine in engines.values():
        engine.run(batches[0].prompts, WARM_UP, plan.temperature, plan.seed)
    active = list(engines)
    for number, batch in enumerate(batches, start=1):
        for setting in active:
            run = engines[setting].run(batch.prompts, plan.length, plan.temperature, plan.seed + number)
            yield TrialRun(setting, run)
        if number == BATCHES_BEFORE_CUT:
            active = promising(runs)


def promising(runs: TrialRuns) -> list[DecodeSetting]:
    """Plain decoding, and what is not far behind it."""
    rates = {setting: total_stats(batches).tokens_per_second for setting, batches in runs.items()}
    return [setting for setting, rate in rates.items() if rate >= FAR_BEHIND * rates[PLAIN]]


def measured_methods(runs: TrialRuns, verify: CostCurve) -> dict[str, MethodMeasurements]:
    """What the trial runs show of each method."""
    methods: dict[str, MethodMeasurements] = {}
    for setting, batches in runs.items():
        if not setting.is_plain:
            k = int(setting.num_draft_tokens)
            methods.setdefault(setting.method, MethodMeasurements({})).by_k[k] = behaviour_of(batches, k, verify)
    return methods


# --- predictions ------------------------------------------------------------------------------------------------------


def estimate(methods: dict[str, MethodMeasurements], plain: PlainCost) -> list[SpeedupEstimate]:
    """Every method and k, the most promising first."""
    estimates = []
    for method, measured in methods.items():
        draft = measured.draft_costs()
        for k in PREDICTED_KS:
            behaviour = measured.nearest(k)
            speedup = plain.speedup(behaviour, k, draft)
            estimates.append(SpeedupEstimate(method, k, behaviour.tokens_per_step(k), speedup))
    return sorted(estimates, key=lambda item: -item.speedup)


def best_of_each_method(estimates: list[SpeedupEstimate]) -> list[SpeedupEstimate]:
    """The best k of each of the best methods: neighbours of one k show nothing new."""
    best: dict[str, SpeedupEstimate] = {}
    for item in estimates:
        best.setdefault(item.method, item)
    return list(best.values())[:NUM_CONFIRMED]


def confirm(
    candidates: Candidates, plan: TunePlan, estimates: list[SpeedupEstimate], show: ShowProgress = untracked
) -> list[ConfirmedSpeedup]:
    """Run the predictions, `auto` with the best one's method, and plain decoding, in turns."""
    predicted = {DecodeSetting(item.method, item.k, plan.temperature): item.speedup for item in estimates}
    settings = list(predicted)
    settings += [DecodeSetting(estimates[0].method, AUTO, plan.temperature)] if estimates else []
    sweep_plan = SweepPlan(
        [DecodeSetting(NONE, 0, plan.temperature), *settings], plan.batches(), plan.length, plan.repeats, seed=plan.seed
    )
    measurements = Measurements(sweep_plan)
    label = f"step 3 of 3: confirming {len(settings)} settings"
    for measurement in show(sweep(candidates, sweep_plan), label, sweep_plan.total):
        measurements.add(measurement)
    return [
        ConfirmedSpeedup(
            setting.method,
            setting.num_draft_tokens,
            predicted.get(setting),
            median(speedups(measurements, str(setting), str(setting.plain))),
            total_stats(measurements.runs(str(setting))).tokens_per_step,
        )
        for setting in settings
    ]


# --- advice -----------------------------------------------------------------------------------------------------------


def advise(
    estimates: list[SpeedupEstimate],
    confirmed: list[ConfirmedSpeedup],
    methods: dict[str, MethodMeasurements],
    plain: PlainCost,
) -> TuneAdvice:
    """One sentence. The measurement decides, unless it is noise; the prediction is stated beside it."""
    if not confirmed:
        return TuneAdvice("No method can draft for this model here: decode without speculation.", NONE, 0, None, None)
    results = [item for item in confirmed if not item.is_noise]
    best = max(results, key=lambda item: item.measured, default=None)
    if best is None or best.measured < LEAST_GAIN:
        return _advice_against(estimates[0], best, [item for item in confirmed if item.is_noise])
    k = best.num_draft_tokens if isinstance(best.num_draft_tokens, int) else estimates[0].k
    measured = methods[best.method]
    shortest = plain.shortest_output(measured.nearest(k), k, measured.draft_costs())
    sentence = f"Use method {best.method} with k={best.num_draft_tokens}: measured {best.measured:.2f}x plain decoding"
    sentence += f", predicted {best.predicted:.2f}x" if best.predicted is not None else ""
    sentence += f"; outputs under {shortest} tokens: not worth it." if shortest > 1 else "."
    return TuneAdvice(sentence, best.method, best.num_draft_tokens, best.predicted, best.measured, shortest)


def _advice_against(
    predicted: SpeedupEstimate, best: ConfirmedSpeedup | None, noisy: list[ConfirmedSpeedup]
) -> TuneAdvice:
    parts = [
        f"Do not speculate on this machine: predicted {predicted.speedup:.2f}x at best ({predicted.method} "
        f"k={predicted.k})"
    ]
    if best is not None:
        parts.append(f"nothing that was run reaches more than {best.measured:.2f}x of plain decoding")
    parts += [
        f"{item.method} k={item.num_draft_tokens} is noise (measured {noise(item.measured, item.tokens_per_step)})"
        for item in noisy
    ]
    sentence = f"{', and '.join(parts)}."
    return TuneAdvice(sentence, NONE, 0, predicted.speedup, None if best is None else best.measured)
