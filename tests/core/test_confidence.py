"""What a confidence means is measured: rates by bin, never falling, believed until there are counts."""

from __future__ import annotations

import random

import pytest

from paceline.core.confidence import ConfidenceTable


def observed(table: ConfidenceTable, confidence: float, accepted: int, rejected: int) -> ConfidenceTable:
    for outcome in [True] * accepted + [False] * rejected:
        table.observe(confidence, outcome)
    return table


def test_a_confidence_is_believed_until_there_are_counts() -> None:
    table = ConfidenceTable()
    assert table.rate(0.35) == pytest.approx(0.35) and table.rate(0.99) > 0.98


@pytest.mark.parametrize(("stated", "true"), [(0.95, 0.4), (0.35, 0.8), (0.65, 0.65)])
def test_a_drafter_that_is_too_sure_or_not_sure_enough_is_corrected(stated: float, true: float) -> None:
    """300 draft tokens: the estimate is 4 standard deviations (0.11) off with a probability of 6e-5; seeded."""
    table, dice = ConfidenceTable(), random.Random(1)
    for _ in range(300):
        table.observe(stated, dice.random() < true)
    assert table.rate(stated) == pytest.approx(true, abs=0.11)


def test_more_confidence_never_means_less_acceptance() -> None:
    table = observed(observed(ConfidenceTable(), 0.55, 40, 0), 0.75, 0, 40)
    rates = [table.rate(place / 200) for place in range(201)]
    assert rates == sorted(rates)
    assert table.rate(0.55) == table.rate(0.75) == pytest.approx(0.5, abs=0.1), "two bins that contradict are pooled"


def test_what_changed_is_learned_again() -> None:
    table = observed(observed(ConfidenceTable(fade=0.98), 0.8, 400, 0), 0.8, 0, 200)
    assert table.rate(0.8) < 0.25


def test_the_least_confidence_of_a_rate_is_where_a_bin_begins() -> None:
    table = observed(observed(ConfidenceTable(), 0.55, 0, 40), 0.65, 40, 0)  # 0.5 to 0.6 is nearly never accepted
    assert table.least_confidence(0.5) == 0.6 and table.rate(0.6) >= 0.5 > table.rate(0.59)
    assert table.least_confidence(0.0) == 0.0 and table.least_confidence(1.01) > 1.0


def test_where_all_drafts_are_better_than_they_say_those_not_seen_yet_are_too() -> None:
    modest, boastful = ConfidenceTable(), ConfidenceTable()
    for _ in range(20):
        modest.observe(0.12, True)
        boastful.observe(0.88, False)
    assert modest.rate(0.35) > 0.8 and boastful.rate(0.65) < 0.2
    assert ConfidenceTable().rate(0.35) == pytest.approx(0.35), "before anything is known a confidence is believed"
