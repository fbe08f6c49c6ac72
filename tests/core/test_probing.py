"""When probes run: from what they may lose, and in any case after a bounded rest."""

from __future__ import annotations

import pytest

from paceline.core.probing import FIRST_PROBES, FIRST_REST, LONGEST_REST, MAX_FACTOR, SHARE, ProbeSchedule


def rest_of(schedule: ProbeSchedule, cost: float) -> int:
    """Plain steps of one second until a probe of this cost is due."""
    schedule.cost, steps = cost, 0
    while not schedule.is_due(cost, 1.0):
        schedule.passed(1.0, 1.0)
        steps += 1
    return steps


def test_the_first_probes_and_the_first_reading_of_a_prompt_are_paid_at_the_start() -> None:
    schedule = ProbeSchedule()
    schedule.open(1.0, 3.0)
    assert schedule.balance == FIRST_PROBES + 3.0 and schedule.is_due(FIRST_PROBES + 3.0, 1.0)
    schedule.open(1.0, 100.0)
    assert schedule.balance == FIRST_PROBES + 3.0, "once"


@pytest.mark.parametrize("cost", [1.0, 100.0, 1e6])
def test_no_rest_is_longer_than_its_bound_whatever_a_probe_costs(cost: float) -> None:
    schedule = ProbeSchedule()
    for _ in range(5):
        assert rest_of(schedule, cost) <= LONGEST_REST
        schedule.drafted(-cost, 1.0, probe=True)
        schedule.probing = False


def test_a_probe_that_must_read_much_waits_longer_but_not_for_ever() -> None:
    schedule = ProbeSchedule(reading=1e6)
    assert LONGEST_REST < rest_of(schedule, 1e6) <= LONGEST_REST * MAX_FACTOR


def test_a_cost_that_was_measured_once_delays_nothing() -> None:
    assert ProbeSchedule(rested=FIRST_REST).is_due(1e6, 1.0, sure=False)


@pytest.mark.parametrize("share", [SHARE, SHARE / 2])
def test_probes_of_a_moderate_cost_stay_within_their_share(share: float) -> None:
    schedule, lost, steps = ProbeSchedule(share=share), 0.0, 0
    for _ in range(40):
        steps += rest_of(schedule, 0.8)
        schedule.drafted(-0.8, 1.0, probe=True)
        lost += 0.8
    assert lost / steps < 1.1 * share


def test_a_probe_that_wins_goes_on() -> None:
    schedule = ProbeSchedule()
    schedule.open(1.0, 0.0)
    schedule.drafted(0.1, 1.0, probe=True)
    assert schedule.is_due(1e6, 1.0), "its reading is done"
    schedule.drafted(-5.0, 1.0, probe=True)
    assert not schedule.is_due(0.1, 1.0)
