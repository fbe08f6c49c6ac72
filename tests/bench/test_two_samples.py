"""Tests of two samples: exact where scipy is, silent where nothing is wrong, and honest about what they would find."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import scipy

from paceline.bench.two_samples import (
    compare_samples,
    detectable_share,
    disjoint_would_be_found,
    fisher,
    permutation_p,
    separation_p,
)

WIDE = 1 / np.arange(1, 301)  # a few common outputs, many rare ones
WIDE = WIDE / WIDE.sum()


def draw(rng: np.random.Generator, draws: int, probabilities: np.ndarray) -> Counter[str]:
    return Counter(f"w{index % 17} n{index}" for index in rng.choice(len(probabilities), draws, p=probabilities))


@pytest.mark.parametrize(("a", "b", "n", "m"), [(8, 2, 20, 25), (0, 5, 5, 5), (3, 3, 10, 40), (100, 0, 100, 100)])
def test_one_event_is_tested_as_scipy_does(a: int, b: int, n: int, m: int) -> None:
    expected = scipy.stats.fisher_exact([[a, b], [n - a, m - b]]).pvalue
    assert fisher(a, b, n, m) == pytest.approx(expected, rel=1e-6)


def test_a_permutation_test_of_two_outputs_is_fishers() -> None:
    """Twice that: the test of repetition has the other half."""
    first, second = Counter(a=14, b=6), Counter(a=7, b=13)
    assert permutation_p(first, second, 0.001) / 2 == pytest.approx(fisher(14, 7, 20, 20), abs=0.03)


@pytest.mark.slow
def test_another_temperature_shows_in_how_often_outputs_repeat() -> None:
    """No output changes much. The seeds are fixed, so this holds always or never."""
    rng, sharper = np.random.default_rng(3), WIDE**1.4 / (WIDE**1.4).sum()
    for number in range(3):
        first, second = draw(rng, 300, np.sqrt(WIDE) / np.sqrt(WIDE).sum()), draw(rng, 300, sharper)
        assert permutation_p(first, second, 0.001, number) < 0.001


def test_separation_is_a_matter_of_counting() -> None:
    assert separation_p([3, 3], 3) == pytest.approx(2 / 20)
    assert separation_p([1, 1, 1, 1], 2) == pytest.approx(1.0)


def test_few_draws_are_no_difference_and_disjoint_ones_are() -> None:
    assert compare_samples(Counter(x=4), Counter(y=4), 0.001).p_value > 0.001
    assert compare_samples(Counter(x=100), Counter(y=100), 1e-9).p_value < 1e-9
    pairs = [Counter({f"{side}{number}": 2 for number in range(50)}) for side in "ab"]
    result = compare_samples(*pairs, 0.001)
    assert result.p_value < 0.001


def test_singles_on_both_sides_would_not_be_told_apart() -> None:
    singles = [Counter({f"n{side} {number}": 1 for number in range(200)}) for side in range(2)]
    assert not disjoint_would_be_found(*singles, 0.001)
    assert disjoint_would_be_found(Counter(x=100), Counter(x=100), 0.001)


@pytest.mark.slow
def test_200_healthy_comparisons_raise_no_more_alarms_than_stated() -> None:
    """At level 0.05 at most 10 alarms are expected; more than 21 happen by chance with probability below 0.001."""
    rng = np.random.default_rng(11)
    alarms = 0
    for number in range(200):
        draws = (30, 150)[number % 2]
        alarms += compare_samples(draw(rng, draws, WIDE), draw(rng, draws, WIDE), 0.05, number).p_value < 0.05
    print(f"{alarms} alarms in 200 comparisons at level 0.05")
    assert alarms <= 21


@pytest.mark.slow
def test_the_stated_difference_is_found_as_often_as_stated() -> None:
    """Of 100 comparisons 95 are expected to find it; fewer than 85 happen by chance with probability below 1e-3."""
    rng = np.random.default_rng(12)
    first, second = draw(rng, 300, WIDE), draw(rng, 300, WIDE)
    testable = compare_samples(first, second, 0.001).num_testable
    share = detectable_share(first, second, 0.001, testable)
    assert 0.1 < share < 0.4
    changed = WIDE * (1 - share / (1 - WIDE[0]))
    changed[0] = WIDE[0] + share
    found = sum(
        compare_samples(draw(rng, 300, changed), draw(rng, 300, WIDE), 0.001, number).p_value < 0.001
        for number in range(100)
    )
    assert found >= 85
