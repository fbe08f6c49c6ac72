"""Curves follow samples, batches learn what they cost."""

from __future__ import annotations

import pytest

from paceline.core.cost_model import CostCurve, CostModel, StepTiming


def test_a_curve_draws_straight_lines_and_goes_on_growing_beyond_them() -> None:
    curve = CostCurve({1: 10.0, 5: 18.0})
    assert [curve.at(size) for size in (1, 3, 5, 9)] == [10.0, 14.0, 18.0, 26.0]
    assert CostCurve({4: 8.0}).at(8) == 16.0
    assert CostCurve().at(3) == 1.0


def test_a_curve_follows_samples_but_not_a_hiccup() -> None:
    curve = CostCurve({1: 10.0})
    curve.add(1, 1000.0)
    assert curve.at(1) == 10.0
    for _ in range(30):
        curve.add(1, 15.0)
    assert curve.at(1) == pytest.approx(15.0, rel=0.02)


def test_one_pass_that_was_held_up_hardly_counts() -> None:
    curve = CostCurve({8: 10.0})
    for _ in range(10):
        curve.add(8, 10.0)
    curve.add(8, 19.0)
    assert curve.at(8) <= 10.51


def test_a_lasting_change_counts_even_if_it_is_large() -> None:
    curve = CostCurve({1: 10.0})
    for _ in range(40):
        curve.add(1, 90.0)
    assert curve.at(1) == pytest.approx(90.0, rel=0.05)


def test_a_sample_after_a_long_time_counts_more() -> None:
    fresh, stale = CostCurve({1: 10.0, 5: 10.0}), CostCurve({1: 10.0, 5: 10.0})
    for curve, others in ((fresh, 0), (stale, 200)):
        curve.add(5, 10.0)
        for _ in range(others):
            curve.add(1, 10.0)
        curve.add(5, 20.0)
    assert stale.at(5) > fresh.at(5) + 3


def test_batch_sizes_learn_on_their_own() -> None:
    costs = CostModel(CostCurve({1: 10.0, 8: 12.0}))
    assert costs.of(8).step(8, 0) == 12.0
    for _ in range(30):
        costs.observe(StepTiming(0.0, 40.0, 8, 0, 8))
    assert costs.of(8).step(8, 0) == pytest.approx(40.0, rel=0.05)
    assert costs.of(1).step(8, 0) == 12.0


def test_a_batch_learns_what_draft_tokens_add_whatever_its_size() -> None:
    costs = CostModel(
        CostCurve({1: 10.0, 8: 12.0, 16: 20.0, 24: 28.0}), CostCurve({0: 0.0, 1: 1.0, 4: 4.0}, unknown=0.0)
    )
    for _ in range(60):
        costs.observe(StepTiming(0.0, 40.0, 8, 0, 8))
        costs.observe(StepTiming(6.0, 56.0, 16, 2, 8, 8))
    assert costs.of(8).pass_of(16) == pytest.approx(56.0, rel=0.05)
    assert costs.of(8).pass_of(24) == pytest.approx(72.0, rel=0.05), "twice what one sequence would pay for eight more"
    assert costs.of(7).pass_of(15) - costs.of(7).pass_of(7) == pytest.approx(2 * (19.0 - 82 / 7), rel=0.05)
    assert costs.of(2).pass_of(2) < costs.of(7).pass_of(7) < 40.0, (
        "a size without samples costs less where it is narrower"
    )
    assert costs.of(8).step(16, 4, 8) == pytest.approx(56.0 + 12.0, rel=0.05), "further sequences add what was sampled"
    assert costs.draft.at(4) == 4.0 and costs.width(16) == 20.0, "one sequence keeps its own costs"


def test_what_the_drafter_catches_up_with_is_not_its_cost() -> None:
    costs = CostModel()
    costs.observe(StepTiming(5.0, 10.0, 3, 2, 1), caught_up=50)
    assert costs.draft.at(2) == 0.0
    assert costs.catching_up(20) == pytest.approx(2.0)
    costs.observe(StepTiming(1.0, 10.0, 3, 2, 1))
    assert costs.draft.at(2) == 1.0
    assert costs.draft.at(1) == 0.5


def test_a_mixed_curve_keeps_the_mean_and_any_other_ignores_hiccups() -> None:
    for mixed, least, most in ((True, 3.0, 8.0), (False, 0.4, 1.6)):
        curve = CostCurve({1: 0.5}, mixed=mixed)
        for _ in range(40):
            curve.add(1, 0.5)
            curve.add(1, 10.0)
        assert least < curve.at(1) < most


def test_more_tokens_never_cost_a_batch_less() -> None:
    costs = CostModel(CostCurve({6: 71.0, 8: 55.0}), grain=8, plain=CostCurve({7: 80.0}))
    assert costs.of(7).pass_of(8) == 80.0


def test_fewer_tokens_never_cost_more_than_was_sampled_of_more() -> None:
    """Plain passes were measured at a busy moment: draft tokens must not seem free until the next plain one."""
    curve = CostCurve({1: 11.0, 4: 12.0, 8: 13.0})
    for _ in range(30):
        curve.add(4, 5.0)
    assert curve.at(1) <= curve.at(4) == pytest.approx(5.0, rel=0.02)
    for _ in range(10):
        curve.add(1, 6.0)
    assert curve.at(1) == pytest.approx(6.0, rel=0.1), "what was sampled lately is what it was sampled to be"


def test_with_a_grain_only_whole_grains_differ_in_cost() -> None:
    costs = CostModel(CostCurve({1: 10.0, 8: 12.0, 16: 20.0, 24: 28.0}), grain=8)
    assert [costs.width(nodes) for nodes in (1, 8, 9, 15, 16, 17, 30)] == [10.0, 12.0, 20.0, 20.0, 20.0, 28.0, 36.0]
    costs.observe(StepTiming(0.0, 40.0, 30, 0, 30))
    assert costs.of(30).pass_of(30) == costs.of(30).pass_of(32) == 40.0 < costs.of(30).pass_of(33)


def test_sizes_that_were_never_sampled_follow_those_that_were() -> None:
    """Measured before the first sequence all sizes are warm: steps in use take a fifth longer."""
    curve = CostCurve({1: 10.0, 4: 20.0, 16: 60.0})
    for _ in range(200):
        curve.add(1, 12.0)
    assert curve.at(4) == pytest.approx(24.0, rel=0.02) and curve.at(16) == pytest.approx(72.0, rel=0.02)
    for _ in range(50):
        curve.add(4, 21.0)
    assert curve.at(4) == pytest.approx(21.0, rel=0.02), "what was sampled is what it was sampled to be"


def test_sizes_that_were_sampled_long_ago_follow_those_that_are_sampled_now() -> None:
    """Wide passes come seldom. Behind a longer context all passes take a quarter longer."""
    curve = CostCurve({1: 10.0, 4: 20.0, 16: 60.0})
    for _ in range(20):
        curve.add(16, 60.0)
    for _ in range(200):
        curve.add(1, 12.5)
    assert curve.at(16) == pytest.approx(75.0, rel=0.02)
    for _ in range(200):
        curve.add(1, 10.0)
    assert curve.at(16) == pytest.approx(60.0, rel=0.02), "and back again"


def test_a_size_that_was_sampled_lately_stays_what_it_was_sampled_to_be() -> None:
    curve = CostCurve({1: 10.0, 16: 60.0})
    for _ in range(100):
        curve.add(16, 66.0)
        curve.add(1, 15.0)
    assert curve.at(16) == pytest.approx(66.0, rel=0.02)
