"""Candidates over table models, engines of them under the stopwatch, and a run as `paceline bench` records it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.bench.candidates import Candidates, DecodeSetting, open_candidates
from paceline.bench.environment import new_run
from paceline.bench.measure import MeasuredEngine, OutputLength
from paceline.bench.results import LosslessCheck, Measurements, setting_record
from paceline.bench.sweep import SweepPlan, grid, prompt_batches, sweep
from paceline.build import OpenModel, build_engine
from paceline.config import EngineConfig
from paceline.core.cost_model import CostCurve, CostModel
from paceline.core.protocols import Drafter, Runner
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.ngram import Ngram
from paceline.drafting.no_draft import NoDraft
from paceline.runners.table import TableRunner
from tests.support.toy import letter_tokenizer

CONTEXT = [0, 1, 2, 3, 0, 1, 2]  # its last tokens occurred before, so a lookup finds something
VOCAB_SIZE = 5
SEED = 3
PASSES = CostCurve({1: 0.001, 9: 0.002})


def toy_candidates(target: Runner | None = None, **drafters: Drafter) -> Candidates:
    """Plain decoding, ngram and draft_model over a table, and further drafters by the name of their method.

    Costs are given, so that no clock decides how many draft tokens `auto` makes.
    """
    target = target or TableRunner(vocab_size=VOCAB_SIZE, seed=SEED)
    opened = OpenModel(target, letter_tokenizer(), "cpu")
    own = {"none": NoDraft(), "ngram": Ngram(), "draft_model": blurred_draft(), **drafters}
    costs = CostModel(CostCurve({1: 1.0, 17: 1.0}))
    configs = {
        method: EngineConfig.create("table", method=method, drafter=drafter, tuned=costs)
        for method, drafter in own.items()
    }
    return open_candidates(
        target, opened.tokenizer, configs, lambda config, runner: build_engine(config, replace(opened, target=runner))
    )


def blurred_draft(vocab_size: int = VOCAB_SIZE, order: int = 2, blur: float = 0.5) -> DraftModel:
    """A draft model that is the target with some noise."""
    return DraftModel(TableRunner(vocab_size=vocab_size, order=order, seed=SEED, blur=blur), vocab_size)


def measured_engine(candidates: Candidates, method: str, k: int = 0) -> MeasuredEngine:
    return MeasuredEngine(candidates.engine(DecodeSetting(method, k)))


def toy_plan(**changes: Any) -> SweepPlan:
    batches = prompt_batches(["code", "code", "chat"], [CONTEXT, [1, 2, 3, 1, 2], [4, 0, 4, 0]], 1)
    first = SweepPlan(grid(["draft_model", "ngram"], [2, 4], [0.0]), batches, OutputLength(12), repeats=2)
    return replace(first, **changes)


def measured(candidates: Candidates, plan: SweepPlan, limit: int | None = None) -> Measurements:
    """The measurements of a sweep, or of its first `limit` runs."""
    measurements = Measurements(plan)
    for number, setting_run in enumerate(sweep(candidates, plan)):
        if number == limit:
            break
        measurements.add(setting_run)
    return measurements


def toy_run(candidates: Candidates, plan: SweepPlan, limit: int | None = None) -> dict[str, Any]:
    """A run as `paceline bench` records it."""
    measurements = measured(candidates, plan, limit)
    run = new_run(["paceline", "bench"], candidates.target.info, None)
    check = LosslessCheck(candidates)
    run |= {
        "complete": True,
        "pass_seconds": {"1": 0.001},
        "settings": [setting_record(measurements, name, check, PASSES) for name in measurements.by_name],
        "workload": {
            "source": "toy",
            "prompts": 3,
            "domains": ["code", "chat"],
            "max_new_tokens": 12,
            "ignore_eos": False,
            "max_num_seqs": 1,
            "repeats": 2,
            "seed": 0,
        },
    }
    return run
