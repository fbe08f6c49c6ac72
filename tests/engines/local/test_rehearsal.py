"""Made-up sequences before the first real one: every number of draft tokens, true costs, and nothing left behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.core.cost_model import CostCurve, CostModel, StepTiming
from paceline.core.draft_length import AdaptiveDraftLength, FixedDraftLength
from paceline.core.types import WarmupPlan
from paceline.drafting.auto import AutoDrafter
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.ngram import Ngram
from paceline.drafting.router import DrafterRouter
from paceline.drafting.suffix import Suffix
from paceline.engines.local import rehearsal
from paceline.engines.local.rehearsal import ForkedDrafts, Rehearsal
from tests.support.build import plain_tokens, sequence, toy_engine
from tests.support.toy import ToyRunner

PLAN = WarmupPlan((1, 2, 4), (1, 3), 4096)


@pytest.fixture(autouse=True)
def _short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "PROMPTS", (10, 20))


def test_every_number_of_draft_tokens_is_run_and_nothing_is_left() -> None:
    runner, draft = ToyRunner(), ToyRunner()
    engine = toy_engine(runner, DraftModel(draft, draft.info.vocab_size), AdaptiveDraftLength())
    own = Rehearsal(engine)
    for prepare in own.preparations(PLAN):
        prepare()
    assert {width for [width, *_] in runner.passes} >= {1, 2, 4}
    assert {timing.num_draft_tokens for timing in own.timings} == {0, 1, 3}
    assert not runner.open_caches and not draft.open_caches
    assert engine.stats().spec.new_tokens == 0 and not engine.has_work
    assert engine.run([sequence([0, 1, 2], 12)])[0].generated == plain_tokens([0, 1, 2], 12)


def test_drafters_that_are_chosen_among_are_prepared_and_rehearsed_too() -> None:
    """Lookups draft for made-up sequences that repeat themselves; a user's first sequence may need the draft model."""
    runner, draft = ToyRunner(), ToyRunner()
    model = DraftModel(draft, draft.info.vocab_size)
    auto = AutoDrafter({"suffix": Suffix()}, {"draft_model": model})
    router = DrafterRouter({"auto": auto, "ngram": Ngram()}, "auto")
    assert auto.rehearsed() == [auto, model] and router.rehearsed() == [router, model]
    assert len(router.preparations(PLAN)) == len(model.preparations(PLAN))
    engine = toy_engine(runner, router, AdaptiveDraftLength())
    for prepare in Rehearsal(engine, model).preparations(PLAN):
        prepare()
    assert draft.passes and not draft.open_caches and engine.stats().spec.new_tokens == 0


def test_trees_are_met_too_and_a_branch_of_them_is_accepted() -> None:
    runner, forked = ToyRunner(), ForkedDrafts()
    rehearsed = Rehearsal(toy_engine(runner, Suffix(), AdaptiveDraftLength()), forked)
    for prepare in rehearsed.forks(PLAN):
        prepare()
    assert {width for [width, *_] in runner.passes} >= {4, 9, 17} and not runner.open_caches and not rehearsed.timings
    assert len(rehearsed.forks(WarmupPlan((1, 3), (2,), 4096))) == 2 * 2 + 1
    engine = toy_engine(runner, forked, FixedDraftLength(6))
    first, second = (engine.run([sequence([0, 1, 2], 12)])[0] for _ in range(2))
    assert first.generated == second.generated == plain_tokens([0, 1, 2], 12)
    assert second.stats.accepted_at == [3, 2, 2]  # of branches of three tokens, and shorter ones at the end


def test_batches_are_rehearsed_too_where_the_plan_has_them() -> None:
    runner = ToyRunner()
    for prepare in Rehearsal(toy_engine(runner)).preparations(WarmupPlan((1, 2), (1,), 4096, (1, 2, 3))):
        prepare()
    assert {len(widths) for widths in runner.passes} == {1, 2, 3} and not runner.open_caches


@pytest.mark.parametrize(
    ("rows", "ks", "decode_steps", "batches"),
    [
        (32, (1, 3, 7), 2, {(2, 8), (4, 8)}),
        (16, (1, 3), 2, {(2, 8)}),
        (32, (2,), 2, {(3, 8)}),
        (None, (1, 3), 2, {(4, 8), (8, 8), (16, 8)}),
        (None, (1, 3), 1, set()),
    ],
    ids=["three draft tokens fit", "one fits", "a number that was named", "not one kernel", "no graphs"],
)
def test_the_largest_quick_batch_is_met_before_a_user_meets_it(
    rows: int | None, ks: tuple[int, ...], decode_steps: int, batches: set[tuple[int, int]]
) -> None:
    runner, draft = ToyRunner(), ToyRunner()
    runner.info, runner.decode_steps = replace(runner.info, rows_rounded_alike=rows), decode_steps
    engine = toy_engine(runner, DraftModel(draft, draft.info.vocab_size), AdaptiveDraftLength())
    own = Rehearsal(engine)
    for prepare in own.preparations(WarmupPlan((1, 2, 4), ks, 4096, quick_batches=(2, 4, 8))):
        prepare()
    met = {(max(widths), len(widths)) for widths in runner.passes if len(widths) > 1}
    assert {size for size in met if size[0] in (2, 3, 4, 8, 16)} == batches
    assert all(timing.num_seqs == 1 for timing in own.timings) and not runner.open_caches


@pytest.mark.parametrize(("ks", "pieces"), [((12,), 2 + 2), ((1, 12), 2 + 2 + 1)])
def test_a_number_of_draft_tokens_that_was_named_is_met_after_every_length_of_prompt(
    ks: tuple[int, ...], pieces: int
) -> None:
    planned = Rehearsal(toy_engine()).preparations(WarmupPlan((1,), ks, 4096))
    greedy = [piece for piece in planned if set(piece.keywords) <= {"measured"}]  # type: ignore[attr-defined]
    assert len(greedy) == pieces


def test_a_plan_that_no_sequence_fits_runs_nothing() -> None:
    assert not Rehearsal(toy_engine()).preparations(WarmupPlan((1,), (1,), 8))


def test_a_policy_starts_from_whole_steps() -> None:
    policy = AdaptiveDraftLength(CostModel(CostCurve({1: 5.0, 8: 5.0})))
    policy.rehearsed([StepTiming(0.0, 1.0, 1, 0, 1), StepTiming(0.1, 1.5, 2, 1, 1)])
    assert policy.costs.width(1) == 5.0, "two numbers of draft tokens make no curve"
    steps = [StepTiming(0.1 * (k > 0), 1.0 + 0.5 * k, k + 1, k, 1) for k in (0, 1, 3)]
    policy.rehearsed([*steps, StepTiming(9.0, 9.0, 6, 3, 2)])
    assert policy.costs.width(4) == 2.5 and policy.costs.draft.at(3) == 0.1
