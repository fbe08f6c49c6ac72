"""How long a draft is worth making: against the best length in hindsight, and after the text has changed."""

from __future__ import annotations

import random

import pytest

from paceline.core.sent_depths import SentDepths

LIMIT = 15
EACH = 0.4  # ms that a draft token takes to make


def runs(mean: float, count: int, seed: int = 0) -> list[int]:
    """Draft tokens that would be sent of one draft after another."""
    dice = random.Random(seed)
    return [min(LIMIT, int(dice.expovariate(1 / mean))) for _ in range(count)]


def won(lengths: list[int], sendable: list[int], each_won: float) -> float:
    """ms that drafts of these lengths win, less those of making them."""
    return sum(each_won * min(made, length) - EACH * made for made, length in zip(lengths, sendable))


def lengths_for(sendable: list[int], each_won: float, depths: SentDepths | None = None) -> list[int]:
    depths, lengths = depths or SentDepths(), []
    for most in sendable:
        lengths.append(depths.length(LIMIT, EACH))
        sent = min(lengths[-1], most)
        depths.observe(lengths[-1], sent, each_won * sent)
    return lengths


@pytest.mark.parametrize("mean", [1.0, 2.5, 6.0])
@pytest.mark.parametrize("each_won", [1.0, 2.0, 6.0])
def test_it_wins_nearly_as_much_as_the_best_length_of_all(mean: float, each_won: float) -> None:
    sendable = runs(mean, 600)
    best = max(won([length] * 600, sendable, each_won) for length in range(1, LIMIT + 1))
    lost = best - won(lengths_for(sendable, each_won), sendable, each_won)
    assert lost < 600 * 0.1 * max(1.0, each_won), "a tenth of what one draft token wins, or of a millisecond"


def test_the_first_draft_is_as_long_as_may_be_and_later_ones_are_not_where_nothing_is_sent() -> None:
    lengths = lengths_for([0] * 20, 1.0)
    assert lengths[0] == LIMIT and max(lengths[1:]) <= 4


def test_after_a_change_of_text_drafts_get_long_again_and_short_again() -> None:
    depths = SentDepths()
    lengths_for([2] * 50, 2.0, depths)
    rising = lengths_for([LIMIT] * 12, 2.0, depths)
    assert rising[-1] == LIMIT
    falling = lengths_for([2] * 30, 2.0, depths)
    assert falling[-1] <= 4


def test_a_depth_that_is_not_made_is_made_again_some_day() -> None:
    depths = SentDepths()
    lengths_for([2] * 50, 2.0, depths)
    assert max(lengths_for([2] * 60, 2.0, depths)) > 2
