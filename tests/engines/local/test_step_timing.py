"""What counts as the time of a step."""

from __future__ import annotations

from collections.abc import Generator
from types import SimpleNamespace

import pytest

from paceline.device.graphs import note_one_off_work, num_one_off_works
from paceline.engines.local import step_timing
from paceline.engines.local.step_timing import Pauses, TimedLoop
from tests.support.build import sequence


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(now=10.0)
    monkeypatch.setattr(step_timing, "time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


def test_the_pause_before_a_step_counts_where_only_steps_of_the_same_sequences_lie_around_it(
    clock: SimpleNamespace,
) -> None:
    pauses, seqs = Pauses(), [sequence([1], 9)]
    assert pauses.begin(seqs).pause == 0.0, "nothing is known before the first step"
    pauses.end(seqs)
    clock.now += 0.5
    assert pauses.begin(seqs).pause == 0.5
    pauses.end(seqs)
    clock.now += 100.0
    assert pauses.begin(seqs).pause == 1.0, "a long one was a hiccup"
    pauses.end(seqs)
    clock.now += 100.0
    assert pauses.begin([sequence([1], 9)]).pause == 1.0, "the time before a new sequence was spent waiting for it"
    pauses.interrupt()
    clock.now += 100.0
    assert pauses.begin(seqs).pause == 1.0, "a prompt was read"


def test_a_step_in_which_something_was_compiled_is_not_clean(clock: SimpleNamespace) -> None:
    begun = Pauses().begin([])
    assert begun.is_clean
    note_one_off_work()
    assert not begun.is_clean


def counted(stops: list[bool | None]) -> Generator[list[int], bool | None, None]:
    for number in range(3):
        stops.append((yield [number]))


def test_the_first_step_of_a_loop_also_waits_for_what_came_before(clock: SimpleNamespace) -> None:
    stops: list[bool | None] = []
    loop = TimedLoop(counted(stops), clock.now, num_one_off_works())
    taken = []
    while loop.next(last=bool(taken)) is not None:
        clock.now += 2.0
        taken.append(loop.timing([3, 1]))
    assert [timing.clean for timing in taken] == [False, True, True]
    assert [timing.seconds for timing in taken[1:]] == [2.0, 2.0]
    assert taken[0].looped and (taken[0].nodes, taken[0].num_draft_tokens, taken[0].num_drafting) == (6, 3, 2)
    assert stops == [True, True, True], "what is told to end is told so after its first step"
