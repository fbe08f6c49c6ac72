"""Whether a setting of an engine that is measured as a whole is lossless: by its outputs without speculation."""

from __future__ import annotations

from collections import Counter

from paceline.bench.candidates import DecodeSetting
from paceline.bench.engine_audit import draw
from paceline.bench.engine_pool import EnginePool
from paceline.bench.engine_ties import compare_outputs
from paceline.bench.outcome import Evidence, Outcome
from paceline.bench.results import (
    CONTEXT_TOKENS,
    SAMPLED_ALPHA,
    LosslessResult,
    Measurements,
    greedy_result,
    repeating,
)
from paceline.bench.sample_comparison import PairedSamples, conclude
from paceline.bench.sampling_test import SampleLimit
from paceline.config import NONE
from paceline.core.stats import SpecStats


class EngineLosslessCheck:
    """Greedy outputs were measured already; sampled settings are drawn from for a few seconds on each side."""

    def __init__(self, pool: EnginePool, limit: SampleLimit | None = None) -> None:
        self._pool, self._limit = pool, limit or SampleLimit(draws=400, seconds=10.0)
        self._drawn: dict[DecodeSetting, Counter[str]] = {}

    def __call__(self, measurements: Measurements, name: str) -> LosslessResult:
        setting = measurements.by_name[name][0].setting
        if setting.is_plain:
            return LosslessResult(Outcome.LOSSLESS, "plain decoding itself")
        if setting.temperature == 0:
            return self._greedy(measurements, name)
        return self._sampled(setting, measurements.plan.batches[0].prompts[0])

    def _greedy(self, measurements: Measurements, name: str) -> LosslessResult:
        plain = measurements.by_name.get(str(DecodeSetting(NONE)), [])
        reference = {item.batch: item.run.outputs for item in plain if item.repeat == 0}
        comparisons = [
            compare_outputs(self._pool, *row)
            for item in measurements.by_name[name]
            if item.repeat == 0 and item.batch in reference
            for row in zip(measurements.plan.batches[item.batch].prompts, reference[item.batch], item.run.outputs)
        ]
        return greedy_result(comparisons, measurements.by_name[name][0].setting.acceptance)

    def _sampled(self, setting: DecodeSetting, prompt: list[int]) -> LosslessResult:
        context = repeating(prompt[-CONTEXT_TOKENS:])
        reference = self._draws(setting.plain, context)
        conclusion = conclude(PairedSamples(self._draws(setting, context), reference), SAMPLED_ALPHA, Evidence())
        return LosslessResult(conclusion.outcome, f"against draws without speculation: {conclusion.detail}")

    def _draws(self, setting: DecodeSetting, context: list[int]) -> Counter[str]:
        if setting not in self._drawn:
            limit = self._limit
            self._drawn[setting] = draw(self._pool, setting, context, limit.draws, limit.seconds, None, SpecStats())
        return self._drawn[setting]
