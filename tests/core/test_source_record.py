"""What is known of the drafts of a source."""

from __future__ import annotations

import pytest

from paceline.core.source_record import STALE, DraftStats


def stats_of(tokens: float, num_drafts: int = 100) -> DraftStats:
    stats = DraftStats()
    for step in range(num_drafts):
        stats.add(tokens, 0.1, step)
    return stats


def test_the_longer_there_was_no_draft_the_more_the_next_one_counts() -> None:
    """Another sequence has begun meanwhile, perhaps: one draft moves what is known by half, not by a sixteenth."""
    stats, rested = stats_of(1.0), stats_of(1.0)
    stats.add(3.0, 0.1, 100)
    rested.add(3.0, 0.1, 100 + STALE)
    assert stats.tokens == pytest.approx(1.12)
    assert rested.tokens == pytest.approx(2.0)


def test_the_first_drafts_count_alike() -> None:
    stats = DraftStats()
    for step, tokens in enumerate((1.0, 2.0, 6.0)):
        stats.add(tokens, 0.1, step)
    assert stats.tokens == pytest.approx(3.0)
