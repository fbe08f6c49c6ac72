"""Swaps and rollbacks keep their stated error probabilities, and are taken where the difference is clear."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.learning.decision import (
    LOOKS,
    ROLLBACK_ERROR,
    SWAP_ERROR,
    FirstTokens,
    ReplayComparison,
    first_token_rate,
    is_lower,
    is_settled,
    permutation_test,
    sign_test,
)


def sequences(rng: np.random.Generator, count: int, rate: float) -> list[FirstTokens]:
    """Sequences whose own rates vary around this one."""
    rates = np.clip(rate + 0.15 * rng.standard_normal(count), 0, 1)
    return [FirstTokens(int(rng.binomial(20, own)), 20) for own in rates]


@pytest.mark.parametrize("pairs", [7, 8, 20, 57, 128])
def test_a_head_that_is_no_better_is_swapped_in_with_the_stated_probability_at_most(pairs: int) -> None:
    """Exact: the sum over all outcomes of a fair coin that the test calls better."""
    swaps = [better for better in range(pairs + 1) if sign_test(better, pairs - better) <= SWAP_ERROR]
    assert 0 < sum(math.comb(pairs, better) for better in swaps) / 2**pairs <= SWAP_ERROR


def test_fewer_than_seven_pairs_never_swap() -> None:
    assert not ReplayComparison((1,) * 6, (9,) * 6).is_better
    assert ReplayComparison((1,) * 7, (9,) * 7).is_better


def test_a_head_that_wins_often_and_loses_much_is_not_swapped_in() -> None:
    often, much = (10,) * 15, (1000,)
    assert ReplayComparison(often + much, (11,) * 15 + (0,)).p_value <= SWAP_ERROR
    assert not ReplayComparison(often + much, (11,) * 15 + (0,)).is_better


def test_sequences_on_which_both_are_equal_do_not_count() -> None:
    comparison = ReplayComparison((5,) * 50 + (1,) * 7, (5,) * 50 + (2,) * 7)
    assert comparison.p_value == 2**-7


@pytest.mark.slow
def test_a_head_that_is_as_good_is_rolled_back_with_the_stated_probability_at_most() -> None:
    """40 swaps of equal heads; more than 4 rollbacks have a probability below 1e-4 at an error of 0.01 each."""
    rng = np.random.default_rng(0)
    rollbacks = 0
    for _ in range(40):
        before, after = sequences(rng, 100, 0.6), sequences(rng, LOOKS[-1], 0.6)
        rollbacks += any(is_lower(before, after[:look]) for look in LOOKS)
    assert rollbacks <= 4


def test_a_head_that_is_clearly_worse_is_rolled_back_at_the_first_look() -> None:
    rng = np.random.default_rng(1)
    before, after = sequences(rng, 100, 0.6), sequences(rng, LOOKS[0], 0.3)
    assert is_lower(before, after)
    assert not is_lower(after, before[: LOOKS[0]]), "a better one stays"
    assert not is_lower(before, after[:-1]), "between two looks nothing is compared"
    assert not is_lower(before[:3], after), "with nothing to compare with nothing is decided"
    assert permutation_test(before, after) <= ROLLBACK_ERROR / len(LOOKS)


def test_a_head_stays_after_the_last_look() -> None:
    assert not is_settled(LOOKS[-1] - 1) and is_settled(LOOKS[-1])


def test_the_rate_is_over_all_first_draft_tokens() -> None:
    assert first_token_rate([FirstTokens(1, 2), FirstTokens(8, 8)]) == 0.9
    assert first_token_rate([]) == 0.0
