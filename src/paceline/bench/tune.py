"""Which method, which k, on this machine, for these prompts: measured, predicted, confirmed.

1. what a pass of the target costs, by width and by batch
2. each method at a small and a large k on a few prompts: acceptance by position, and what guessing costs
3. the theory predicts every method and k from that
4. the best predictions are run against plain decoding, in turns, and the fastest is the advice
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from paceline.bench.candidates import PLAIN, Setting, Subject
from paceline.bench.measure import Length, Written, added, write
from paceline.bench.results import Collected, answers_of, speedups
from paceline.bench.speedup_model import Answers, Habits, habits_of, observed_curve
from paceline.bench.sweep import SweepPlan, Task, sweep
from paceline.config import AUTO
from paceline.core.cost_model import CostCurve, draft_curve
from paceline.core.draft_length import FixedDraftLength
from paceline.engines.local.warmup import measure_pass

TRIED_KS = (3, 8)
PREDICTED_KS = tuple(range(1, 17))
WORTH_IT = 1.03  # below this a measured gain is within the noise of a machine
CONFIRMED = 2  # predictions that are run
LOOK = 2  # prompts after which settings far behind plain decoding are left: they take longest and promise least
FAR_BEHIND = 0.6  # times plain decoding
WIDTHS = (1, 2, 3, 4, 5, 7, 9, 13, 17)


@dataclass(frozen=True, slots=True)
class TunePlan:
    """What to tune on. texts: prompts answered together, as the user will."""

    prompts: list[list[int]]
    length: Length = field(default_factory=Length)
    temperature: float = 0.0
    texts: int = 1
    repeats: int = 2
    seed: int = 0

    def tasks(self) -> list[Task]:
        groups = range(0, len(self.prompts), self.texts)
        return [Task("text", self.prompts[start : start + self.texts]) for start in groups]


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the theory says about one setting."""

    method: str
    k: int
    tokens_per_step: float
    speedup: float


@dataclass(frozen=True, slots=True)
class Known:
    """All that was measured of one method."""

    habits: dict[int, Habits]  # by the k it was tried with

    def nearest(self, k: int) -> Habits:
        return self.habits[min(self.habits, key=lambda tried: abs(tried - k))]

    def draft(self) -> CostCurve:
        return draft_curve({k: habits.draft for k, habits in self.habits.items()})


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A prediction, or `auto`, after it was run."""

    method: str
    num_draft_tokens: int | str
    predicted: float | None
    measured: float


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do, in one sentence and in figures."""

    sentence: str
    method: str
    num_draft_tokens: int | str
    predicted: float | None
    measured: float | None
    shortest_answer: int = 0


@dataclass(frozen=True, slots=True)
class Tuning:
    """Everything tune found out."""

    advice: Advice
    predictions: list[Prediction]
    confirmed: list[Confirmed]
    verify: CostCurve
    draft: CostCurve


Runs = dict[tuple[str, int], list[Written]]


def trial_runs(subject: Subject, plan: TunePlan) -> Runs:
    """Plain texts, and every method at a small and a large k. Takes turns by prompt."""
    tasks = plan.tasks()
    settings = [(method, k) for method in subject.guessing_methods for k in TRIED_KS]
    runs: Runs = {pair: [] for pair in [(PLAIN, 0), *settings]}
    going = list(runs)
    for number, task in enumerate([tasks[0], *tasks]):
        for method, k in going:
            setting = Setting(method, k, plan.temperature)
            length = Length(8) if number == 0 else plan.length  # the first turn warms up
            written = write(subject, setting, task.prompts, length, budget=FixedDraftLength(k), seed=plan.seed + number)
            if number:
                runs[method, k].append(written)
        if number == LOOK:
            going = promising(runs)
    return runs


def promising(runs: Runs) -> list[tuple[str, int]]:
    """Plain decoding, and what is not far behind it."""
    rates = {pair: added(written).tokens_per_second for pair, written in runs.items()}
    return [pair for pair, rate in rates.items() if rate >= FAR_BEHIND * rates[PLAIN, 0]]


def known_methods(runs: Runs, verify: CostCurve) -> dict[str, Known]:
    """What the runs tell of each method."""
    found: dict[str, Known] = {}
    for (method, k), written in runs.items():
        if method != PLAIN:
            found.setdefault(method, Known({})).habits[k] = habits_of(written, k, verify)
    return found


def predictions(known: dict[str, Known], answers: Answers) -> list[Prediction]:
    """Every method and k, the most promising first."""
    found = [
        Prediction(method, k, habits.tokens_per_step(k), answers.speedup(habits, k, mine.draft()))
        for method, mine in known.items()
        for k in PREDICTED_KS
        for habits in [mine.nearest(k)]
    ]
    return sorted(found, key=lambda one: -one.speedup)


def chosen(found: list[Prediction]) -> list[Prediction]:
    """The best k of each of the best methods: neighbours of one k tell nothing new."""
    best: dict[str, Prediction] = {}
    for one in found:
        best.setdefault(one.method, one)
    return list(best.values())[:CONFIRMED]


def confirm(subject: Subject, plan: TunePlan, candidates: list[Prediction]) -> list[Confirmed]:
    """Run the candidates, the never-lose rule with the best one's method, and plain decoding, in turns."""
    warm = plan.temperature
    settings = [Setting(one.method, one.k, warm) for one in candidates]
    if candidates:
        settings.append(Setting(candidates[0].method, AUTO, warm))
    sweeping = SweepPlan([Setting(PLAIN, 0, warm), *settings], plan.tasks(), plan.length, plan.repeats, seed=plan.seed)
    collected = Collected(sweeping)
    for measured in sweep(subject, sweeping):
        collected.add(measured)
    expected = {(one.method, one.k): one.speedup for one in candidates}
    return [
        Confirmed(
            setting.method,
            setting.num_draft_tokens,
            expected.get((setting.method, setting.num_draft_tokens)),  # type: ignore[arg-type]
            median(speedups(collected, str(setting), str(setting.baseline))),
        )
        for setting in settings
    ]


def tune(subject: Subject, plan: TunePlan) -> Tuning:
    """All four steps."""
    verify = measure_pass(subject.target, WIDTHS, num_seqs=plan.texts)
    runs = trial_runs(subject, plan)
    verify = observed_curve(verify, runs[PLAIN, 0])
    known = known_methods(runs, verify)
    answers = answers_of(runs[PLAIN, 0], verify)
    found = predictions(known, answers)
    confirmed = confirm(subject, plan, chosen(found))
    advice = advise(found, confirmed, known, answers)
    draft = known[advice.method].draft() if advice.method in known else draft_curve()
    return Tuning(advice, found, confirmed, verify, draft)


def advise(found: list[Prediction], confirmed: list[Confirmed], known: dict[str, Known], answers: Answers) -> Advice:
    """One sentence. What was measured decides; what was predicted is named beside it."""
    if not confirmed:
        return Advice("No method can guess for this model here: decode plainly.", PLAIN, 0, None, None)
    best = max(confirmed, key=lambda one: one.measured)
    ahead = found[0]
    if best.measured < WORTH_IT:
        sentence = (
            f"Do not speculate on this machine: predicted {ahead.speedup:.2f}x at best ({ahead.method} k={ahead.k}), "
            f"and nothing that was run reaches more than {best.measured:.2f}x of plain decoding."
        )
        return Advice(sentence, PLAIN, 0, ahead.speedup, best.measured)
    k = best.num_draft_tokens if isinstance(best.num_draft_tokens, int) else ahead.k
    mine = known[best.method]
    shortest = answers.shortest_worth_it(mine.nearest(k), k, mine.draft())
    sentence = f"Use method {best.method} with k={best.num_draft_tokens}: measured {best.measured:.2f}x plain decoding"
    sentence += f", predicted {best.predicted:.2f}x" if best.predicted is not None else ""
    sentence += f"; answers under {shortest} tokens: not worth it." if shortest > 1 else "."
    return Advice(sentence, best.method, best.num_draft_tokens, best.predicted, best.measured, shortest)
