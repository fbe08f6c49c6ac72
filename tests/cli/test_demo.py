"""paceline demo, in this process with a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest

from paceline.cli import demo

COMMAND = ("demo", "-m", "TINY", "--method", "ngram", "--max-new-tokens", "20", "-k", "3", "--json", "abcabcabc")


def test_demo_prints_both_outputs_and_whether_they_are_identical(run_command: Any) -> None:
    result = run_command(*COMMAND)
    assert result.status == 0
    assert "identical: yes" in result.out and "speed-up" in result.out and "τ" in result.out
    document = result.json()
    assert document["identical"] is True
    assert document["plain"]["new_tokens"] == document["speculative"]["new_tokens"] > 0
    assert document["plain"]["drafted"] == 0
    assert document["repeats"] == 3
    assert len(document["plain"]["decode_tokens_per_second"]) == 3
    assert result.out.count("plain\n-----") == 1  # repeats are timed, not shown


def busy_clock() -> Iterator[float]:
    """A machine that goes to sleep between two outputs ever less: the later a run, the faster it looks."""
    now = 0.0
    for tick in count():
        now += 1.0 / (1 + tick) ** 2
        yield now


@pytest.mark.slow
def test_a_speed_up_above_the_tokens_per_step_is_called_noise(
    run_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pair only, on a machine that gets faster and faster: the second side looks far better than it is."""
    ticks = busy_clock()
    monkeypatch.setattr(demo, "clock", lambda: next(ticks))
    result = run_command(*COMMAND, "--repeats", "1")
    document = result.json()
    assert document["measured"]["median"] > document["tokens_per_step"]
    assert (document["speed_up"], document["noise"]) == (None, True)
    assert "noise: measured" in result.out
    assert "idle machine" in result.out


@pytest.mark.slow
def test_a_speed_up_within_the_tokens_per_step_is_a_result(run_command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a clock that ticks once an output, outputs of one token each: both sides are equally fast."""
    ticks = count()
    monkeypatch.setattr(demo, "clock", lambda: float(next(ticks)))
    document = run_command(*COMMAND).json()
    assert document["noise"] is False
    assert document["speed_up"] == 1.0 <= document["tokens_per_step"]
    assert document["plain"]["decode_tokens_per_second"] == [1.0] * 3


def test_no_pair_of_runs_is_an_error(run_command: Any) -> None:
    result = run_command(*COMMAND, "--repeats", "0")
    assert result.status == 2
    assert "--repeats" in result.err
