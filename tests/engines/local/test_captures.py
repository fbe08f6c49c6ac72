"""A dry run of graphs on a CPU: what loading makes ready is all that a sequence meets, after every length of prompt."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from paceline.build import AUTO_KS, FAST_KS, QUICK_BATCHES, _prepare
from paceline.core.draft_length import AdaptiveDraftLength
from paceline.core.protocols import Drafter
from paceline.core.sampling import SamplingParams
from paceline.core.types import WarmupPlan
from paceline.drafting import draft_model
from paceline.drafting.auto import AutoDrafter
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.suffix import Suffix
from paceline.engines.local import rehearsal
from paceline.engines.local.engine import LocalEngine
from paceline.engines.local.rehearsal import PROMPTS, Rehearsal, rehearse
from paceline.engines.local.warmup import measure_costs
from paceline.layers.attention import EagerAttention
from paceline.runners.native import NativeRunner
from paceline.runners.native.prefill_graphs import PrefillGraphs
from tests.runners.native.fused import TorchGraphs
from tests.runners.native.models import tiny
from tests.support.build import sequence, toy_engine
from tests.support.counting_pool import CountingPool

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="its graphs are made up")
PLAN = WarmupPlan(tuple(range(1, AUTO_KS[-1] + 2)), FAST_KS, 2048, quick_batches=QUICK_BATCHES)
KERNEL_ROWS = 32  # of a pass that is one kernel
LENGTHS = (3, 60, 100, 250, 400, 505, 900, 1010, 1400)


def runner(pool: CountingPool, noise: float, *, one_kernel: bool) -> NativeRunner:
    model, generator = tiny("llama", max_position_embeddings=4096), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * torch.randn(weight.shape, generator=generator)
    made = NativeRunner.of_model(model, "tiny", kv_cache_tokens=8192)
    made.decode_graphs, made.decode_steps = TorchGraphs(made, pool), 8
    parts = (made.model, made.kv, made.eager.ops, made._rope_caches, made.options)
    made.prefill_graphs = PrefillGraphs(*parts, pool)
    if one_kernel:
        holds = SimpleNamespace(max_rows=KERNEL_ROWS, holds=lambda rows: rows <= KERNEL_ROWS)
        made.decode_graphs._persistent = holds  # type: ignore[assignment]
        made.info = replace(made.info, rows_rounded_alike=KERNEL_ROWS)
    return made


@dataclass
class Loaded:
    """An engine as loading leaves it, and the captures of its two models."""

    engine: LocalEngine
    pool: CountingPool
    captured: list[int]  # after the plan's sizes, after the costs, after the rehearsal

    @classmethod
    def of(cls, method: str, *, target_is_one_kernel: bool) -> Loaded:
        pool = CountingPool()
        target = runner(pool, 0.0, one_kernel=target_is_one_kernel)
        draft = DraftModel(runner(pool, 0.02, one_kernel=True), target.info.vocab_size)
        drafter: Drafter = draft if method == "draft_model" else AutoDrafter({"suffix": Suffix()}, {"draft": draft})
        _prepare(target, drafter, PLAN)
        captured = [pool.captured]
        target.info = replace(target.info, device="cuda")  # what is measured depends on it
        costs = measure_costs(target, draft.runner if method == "draft_model" else None)
        target.info = replace(target.info, device="cpu")
        captured.append(pool.captured)
        policy = AdaptiveDraftLength(costs, AUTO_KS[-1], target.info.rows_rounded_alike)
        if (value := policy.draft_value()) is not None:
            drafter.use_value(value)
        engine = toy_engine(target, drafter, policy, max_num_seqs=1)
        rehearse(engine, PLAN)
        return cls(engine, pool, [*captured, pool.captured])

    def run(self, length: int, k: int | None = None, temperature: float = 0.0) -> int:
        """Graphs that a sequence captures. k: draft tokens that it asks for; None: the policy decides."""
        before = self.pool.captured
        prompt = [(3 + place * place) % 101 for place in range(length)]
        self.engine.run([sequence(prompt, 40, SamplingParams(temperature=temperature, seed=1), num_draft_tokens=k)])
        return self.pool.captured - before


@pytest.fixture(autouse=True)
def _as_with_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (draft_model, rehearsal):
        monkeypatch.setattr(module, "supports_graphs", lambda device: True)
    # What is written does not matter here, and to read long prompts would take most of the time.
    monkeypatch.setattr(EagerAttention, "__call__", lambda self, queries, *rest: queries.flatten(1))


@pytest.mark.slow
@pytest.mark.parametrize("target_is_one_kernel", [False, True], ids=["many kernels", "one kernel"])
@pytest.mark.parametrize("method", ["draft_model", "auto"])
def test_no_sequence_captures_a_graph_after_a_rehearsal(method: str, target_is_one_kernel: bool) -> None:
    loaded = Loaded.of(method, target_is_one_kernel=target_is_one_kernel)
    assert loaded.captured[0] > 0
    met = {(length, k): loaded.run(length, k) for length in LENGTHS for k in (None, 0, *FAST_KS)}
    assert set(met.values()) == {0}, {case: count for case, count in met.items() if count}


@pytest.mark.slow
@pytest.mark.parametrize("target_is_one_kernel", [False, True], ids=["many kernels", "one kernel"])
def test_measuring_costs_captures_nothing_that_no_sequence_needs(target_is_one_kernel: bool) -> None:
    loaded = Loaded.of("draft_model", target_is_one_kernel=target_is_one_kernel)
    prepared, measured, _ = loaded.captured
    assert measured == prepared


def runs_of(*, draft_is_one_kernel: bool) -> list[tuple[Any, ...]]:
    """Numbers of draft tokens and lengths of prompts of the greedy sequences that are rehearsed."""
    pool = CountingPool()
    target, draft = runner(pool, 0.0, one_kernel=False), runner(pool, 0.02, one_kernel=draft_is_one_kernel)
    engine = toy_engine(target, DraftModel(draft, target.info.vocab_size), max_num_seqs=1)
    pieces = Rehearsal(engine).preparations(PLAN)
    return [piece.args[:2] for piece in pieces if set(piece.keywords) <= {"measured"}]  # type: ignore[attr-defined]


def test_long_prompts_are_rehearsed_with_the_most_draft_tokens_where_one_graph_serves_all() -> None:
    quick, other = (runs_of(draft_is_one_kernel=one) for one in (True, False))
    assert other == [(k, length) for k in (0, *FAST_KS) for length in PROMPTS]
    assert [k for k, length in quick if length == PROMPTS[0]] == [0, *FAST_KS]
    assert [(k, length) for k, length in quick if length > PROMPTS[0]] == [
        (k, length) for k in (0, FAST_KS[-1]) for length in PROMPTS[1:]
    ]
