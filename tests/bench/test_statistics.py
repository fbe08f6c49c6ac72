from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import scipy

from paceline.bench.statistics import (
    Spread,
    against_exact,
    chi2_quantile,
    chi2_tail,
    detectable_distance,
    power,
)


@pytest.mark.parametrize(("x", "degrees_of_freedom"), [(0.5, 1), (10.0, 3), (80.0, 40), (300.0, 200)])
def test_the_tail_of_chi_squared_is_scipys(x: float, degrees_of_freedom: int) -> None:
    assert chi2_tail(x, degrees_of_freedom) == pytest.approx(scipy.stats.chi2.sf(x, degrees_of_freedom), rel=1e-6)


@pytest.mark.parametrize(("alpha", "degrees_of_freedom"), [(0.05, 1), (1e-5, 15), (1e-3, 80)])
def test_the_quantile_is_scipys(alpha: float, degrees_of_freedom: int) -> None:
    assert chi2_quantile(alpha, degrees_of_freedom) == pytest.approx(
        scipy.stats.chi2.isf(alpha, degrees_of_freedom), rel=1e-6
    )


@pytest.mark.parametrize(("distance", "draws", "degrees_of_freedom"), [(0.1, 400, 10), (0.05, 3000, 40), (0.0, 100, 3)])
def test_power_is_that_of_the_non_central_distribution(distance: float, draws: int, degrees_of_freedom: int) -> None:
    edge = scipy.stats.chi2.isf(0.001, degrees_of_freedom)
    expected = scipy.stats.ncx2.sf(edge, degrees_of_freedom, max(4 * draws * distance**2, 1e-12))
    assert power(distance, draws, degrees_of_freedom, 0.001) == pytest.approx(expected, abs=1e-6)


def test_the_stated_distance_is_found_as_often_as_stated() -> None:
    """A distribution that is off by the detectable distance is found in 95% of runs or more.

    Of 300 runs, fewer than 270 would happen by chance with probability below 1e-3."""
    exact = dict.fromkeys(range(8), 1 / 8)
    distance = detectable_distance(500, 7, 0.001)
    shifted = [1 / 8 + (distance / 4 if cell < 4 else -distance / 4) for cell in range(8)]
    rng = np.random.default_rng(5)
    num_found = 0
    for _ in range(300):
        counts = Counter(dict(enumerate(rng.multinomial(500, shifted).tolist())))
        num_found += against_exact(counts, exact).p_value < 0.001
    assert num_found >= 270


def test_p_values_are_uniform_when_nothing_is_wrong() -> None:
    """Kolmogorov-Smirnov over 400 runs; fails by chance with probability 1e-4."""
    probabilities = [0.4, 0.3, 0.15, 0.1, 0.03, 0.01, 0.005, 0.005]
    rng = np.random.default_rng(6)
    values = [
        against_exact(
            Counter({c: n for c, n in enumerate(rng.multinomial(600, probabilities).tolist()) if n}),
            dict(enumerate(probabilities)),
        ).p_value
        for _ in range(400)
    ]
    assert scipy.stats.kstest(values, "uniform").pvalue > 1e-4


def test_an_impossible_outcome_is_proof_by_itself() -> None:
    fit = against_exact(Counter({"a": 99, "z": 1}), {"a": 0.5, "b": 0.5})
    assert fit.p_value == 0.0


def test_one_possible_outcome_proves_nothing_and_fails_nothing() -> None:
    assert against_exact(Counter({"a": 50}), {"a": 1.0}).p_value == 1.0


def test_a_spread_is_a_median_between_extremes() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)
