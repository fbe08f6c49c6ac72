"""How long a draft is worth making: against the best length in hindsight, and after the text has changed."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from paceline.core.depth_gains import DepthGains

LIMIT = 15
EACH = 0.4  # ms that a draft token takes to make
Making = Callable[[int], float]


def runs(mean: float, count: int, seed: int = 0) -> list[int]:
    """Draft tokens that would be sent of one draft after another."""
    dice = random.Random(seed)
    return [min(LIMIT, int(dice.expovariate(1 / mean))) for _ in range(count)]


def evenly(length: int) -> float:
    return EACH * length


def in_steps(length: int) -> float:
    """As kernels that take four rows at a time, one of which is no draft token."""
    return 4 * EACH * (1 + length // 4)


def won(lengths: list[int], sendable: list[int], each_won: float, making: Making = evenly) -> float:
    """ms that drafts of these lengths win, less those of making them."""
    return sum(each_won * min(made, length) - making(made) for made, length in zip(lengths, sendable))


def lengths_for(
    sendable: list[int], each_won: float, depths: DepthGains | None = None, making: Making = evenly
) -> list[int]:
    depths, lengths = depths or DepthGains(), []
    for most in sendable:
        lengths.append(depths.length(LIMIT, making))
        depths.observe(lengths[-1], [each_won] * min(lengths[-1], most))
    return lengths


@pytest.mark.parametrize("making", [evenly, in_steps])
@pytest.mark.parametrize("mean", [1.0, 2.5, 6.0])
@pytest.mark.parametrize("each_won", [1.0, 2.0, 6.0])
def test_it_wins_nearly_as_much_as_the_best_length_of_all(mean: float, each_won: float, making: Making) -> None:
    sendable = runs(mean, 600)
    best = max(won([length] * 600, sendable, each_won, making) for length in range(1, LIMIT + 1))
    lost = best - won(lengths_for(sendable, each_won, making=making), sendable, each_won, making)
    assert lost < 600 * 0.2 * max(1.0, each_won), "a fifth of what one draft token wins, or of a millisecond"


def test_the_first_draft_is_as_long_as_may_be_and_later_ones_are_not_where_nothing_is_sent() -> None:
    lengths = lengths_for([0] * 20, 1.0)
    assert lengths[0] == LIMIT and max(lengths[1:]) <= 4


def test_a_draft_fills_the_rows_that_a_kernel_takes_at_a_time() -> None:
    lengths = lengths_for(runs(2.5, 300), 2.0, making=in_steps)
    assert sum(length % 4 == 3 for length in lengths[50:]) > 0.9 * 250


def test_after_a_change_of_text_drafts_get_long_again_and_short_again() -> None:
    depths = DepthGains()
    lengths_for([2] * 50, 2.0, depths)
    rising = lengths_for([LIMIT] * 12, 2.0, depths)
    assert rising[-1] == LIMIT
    falling = lengths_for([2] * 30, 2.0, depths)
    assert falling[-1] <= 4


def test_a_depth_that_is_not_made_is_made_again_some_day() -> None:
    depths = DepthGains()
    lengths_for([2] * 50, 2.0, depths)
    assert max(lengths_for([2] * 60, 2.0, depths)) > 2
