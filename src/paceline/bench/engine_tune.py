"""Which engine, method and k are fastest on this machine, by tokens per second on the same prompts.

Every engine is measured as a whole. Outputs of two engines may differ, since their weights and kernels do; within one
engine a setting must give what plain decoding gives, or it is not recommended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from paceline.bench.candidates import DecodeSetting
from paceline.bench.compare import exceeds_tokens_per_step
from paceline.bench.engine_pool import EnginePool, engine_sweep, possible_settings
from paceline.bench.engine_results import EngineLosslessCheck
from paceline.bench.measure import total_stats
from paceline.bench.outcome import Outcome
from paceline.bench.results import Measurements
from paceline.bench.sweep import PromptBatch, SweepPlan, grid, prompt_batches
from paceline.bench.tune import LEAST_GAIN, ShowProgress, TunePlan, untracked
from paceline.config import NONE, EngineConfig

TRIED_KS: tuple[int, ...] = (3, 8)
LOADS = (1, 4, 16, 64)  # sequences at a time that are tried, up to the user's number


@dataclass(frozen=True, slots=True)
class EngineRate:
    """One setting of one engine. tokens_per_second: at the user's load; by_load: at each that was tried."""

    engine: str
    model: str
    device: str
    setting: DecodeSetting
    tokens_per_second: float
    tokens_per_step: float
    outcome: Outcome
    config: EngineConfig = field(repr=False)
    by_load: dict[int, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.engine} {self.setting}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "model": self.model,
            "device": self.device,
            "method": self.setting.method,
            "num_draft_tokens": self.setting.num_draft_tokens,
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_step": self.tokens_per_step,
            "outcome": self.outcome.value,
            "by_load": {str(load): rate for load, rate in self.by_load.items()},
        }


def loads_up_to(max_num_seqs: int) -> list[int]:
    return [*(load for load in LOADS if load < max_num_seqs), max_num_seqs]


def measure_settings(
    pool: EnginePool, plan: TunePlan, settings: list[DecodeSetting], show: ShowProgress = untracked
) -> list[EngineRate]:
    """Rates of these settings, plain decoding among them. Raises what plain decoding raises."""
    device = pool.decoder(settings[0]).info.device
    settings = possible_settings(pool, settings)
    measurements = Measurements(SweepPlan(settings, _batches(plan), plan.length, plan.repeats, seed=plan.seed))
    engine = pool.configs[NONE].engine
    label = f"measuring {len(settings)} settings of {engine}"
    for item in show(engine_sweep(pool, measurements.plan), label, measurements.plan.total):
        measurements.add(item)
    check = EngineLosslessCheck(pool)
    outcomes = {name: check(measurements, name).outcome for name in measurements.by_name}
    return [_rate(pool, plan, measurements, name, device, outcome) for name, outcome in outcomes.items()]


def tried_settings(methods: Iterable[str], temperature: float) -> list[DecodeSetting]:
    return grid(list(methods), list(TRIED_KS), [temperature])


def _batches(plan: TunePlan) -> list[PromptBatch]:
    """All prompts at each load; the load is the domain, so that measurements are kept apart by it."""
    return [
        batch
        for load in loads_up_to(plan.max_num_seqs)
        for batch in prompt_batches([str(load)] * len(plan.prompts), plan.prompts, load)
    ]


def _rate(
    pool: EnginePool, plan: TunePlan, measurements: Measurements, name: str, device: str, outcome: Outcome
) -> EngineRate:
    setting = measurements.by_name[name][0].setting
    config = pool.config_of(setting)
    runs_by_load = {load: measurements.runs(name, str(load)) for load in loads_up_to(plan.max_num_seqs)}
    by_load = {load: total_stats(runs).tokens_per_second for load, runs in runs_by_load.items()}
    return EngineRate(
        config.engine,
        str(config.model.model),
        device,
        setting,
        by_load[plan.max_num_seqs],
        total_stats(measurements.runs(name)).tokens_per_step,
        outcome,
        config,
        by_load,
    )


# --- advice -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EngineAdvice:
    """The fastest setting, and the fastest of the next engine."""

    sentence: str
    best: EngineRate
    next: EngineRate | None


def advise_engine(rates: list[EngineRate]) -> EngineAdvice:
    """By measurement alone. Speculation whose gain is noise is not recommended over plain decoding."""
    leaders = sorted((_leader(group) for group in _by_engine(rates)), key=lambda rate: -rate.tokens_per_second)
    best = leaders[0]
    following = leaders[1] if len(leaders) > 1 else None
    sentence = f"{_described(best)} is fastest on this machine: {best.tokens_per_second:.1f} tokens/s"
    if following is not None:
        ratio = best.tokens_per_second / following.tokens_per_second
        sentence += f", {ratio:.2f}x the next ({_described(following)}, {following.tokens_per_second:.1f} tokens/s)"
    plain = _plain(rate for rate in rates if rate.engine == best.engine)
    if plain is not None and not best.setting.is_plain:
        sentence += f" and {best.tokens_per_second / plain.tokens_per_second:.2f}x its own plain decoding"
    return EngineAdvice(f"{sentence}.", best, following)


def _by_engine(rates: list[EngineRate]) -> list[list[EngineRate]]:
    groups: dict[str, list[EngineRate]] = {}
    for rate in rates:
        groups.setdefault(rate.engine, []).append(rate)
    return list(groups.values())


def _leader(rates: list[EngineRate]) -> EngineRate:
    """The fastest setting of one engine that is not shown to differ from its plain decoding."""
    plain = _plain(rates)
    drafting = [rate for rate in rates if not rate.setting.is_plain and rate.outcome is not Outcome.DIFFERENT]
    if plain is not None:
        drafting = [rate for rate in drafting if not _is_noise(rate, rate.tokens_per_second, plain.tokens_per_second)]
    best = max(drafting, key=lambda rate: rate.tokens_per_second, default=None)
    if best is None or plain is None:
        return best or plain or rates[0]
    return best if best.tokens_per_second >= LEAST_GAIN * plain.tokens_per_second else plain


def _plain(rates: Iterable[EngineRate]) -> EngineRate | None:
    """Plain decoding; None for a server that drafts as it was started."""
    return next((rate for rate in rates if rate.setting.is_plain), None)


def _is_noise(rate: EngineRate, speed: float, plain: float) -> bool:
    return exceeds_tokens_per_step(speed / plain, rate.tokens_per_step) if plain else False


def _described(rate: EngineRate) -> str:
    if rate.setting.is_plain:
        return f"{rate.engine} without speculation"
    return f"{rate.engine} with {rate.setting.method} k={rate.setting.num_draft_tokens}"


def k_by_load(best: EngineRate, rates: list[EngineRate]) -> list[list[int]]:
    """[[first, last, k], …]: the best k of one method at each load that was tried; 0 where plain decoding is faster.

    A load that was not tried has the k of the next greater one that was.
    """
    tried = [
        rate
        for rate in rates
        if rate.engine == best.engine and rate.setting.method in (NONE, best.setting.method)
        and isinstance(rate.setting.num_draft_tokens, int) and rate.outcome is not Outcome.DIFFERENT
    ]  # fmt: skip
    plain = _plain(tried)
    schedule: list[list[int]] = []
    for load in sorted(best.by_load):
        speed = 0.0 if plain is None else plain.by_load[load]
        able = [rate for rate in tried if rate is plain or not _is_noise(rate, rate.by_load[load], speed)]
        fastest = max(able, key=lambda rate: rate.by_load[load])
        first = schedule[-1][1] + 1 if schedule else 1
        k = int(fastest.setting.num_draft_tokens)
        if schedule and schedule[-1][2] == k:
            schedule[-1][1] = load
        else:
            schedule.append([first, load, k])
    return schedule
