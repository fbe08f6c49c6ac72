"""Two sides in turns: what counts, what is called noise, and what is never a result."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.bench.compare import Comparison, TimedRun, interleaved, timed
from paceline.core.stats import SpecStats
from paceline.core.types import RequestOutput


def run(seconds: float, tokens: int = 11, steps: int = 11, token: int = 7) -> TimedRun:
    """The first step emits one token at time 0, the others take `seconds` in all."""
    return TimedRun([token] * tokens, SpecStats(tokens, steps), 1, 0.0, seconds)


def test_the_two_sides_take_turns_and_take_turns_in_beginning() -> None:
    order: list[str] = []

    def side(name: str) -> TimedRun:
        order.append(name)
        return run(1.0)

    interleaved(lambda: side("plain"), lambda: side("speculative"), 3)
    assert order == ["plain", "speculative", "speculative", "plain", "plain", "speculative"]


def test_the_first_step_counts_neither_in_time_nor_in_tokens() -> None:
    """Reading the prompt takes 100 s; the first step emits two draft tokens and one of the target's own."""
    times = iter([100.0, 100.0, 100.0, 101.0, 101.0, 102.0])
    flags = [True, True, False, True, False, False]
    outputs = [RequestOutput("x", [7], from_draft=flag) for flag in flags]
    outputs.append(RequestOutput("", [], finish_reason="length", stats=SpecStats(6, 3)))
    result = TimedRun()
    assert list(timed(outputs, result, lambda: next(times, 200.0))) == outputs
    assert (result.tokens, result.steps, result.tokens_per_second) == (3, 2, 1.5)


def test_a_busy_machine_is_noise_and_no_result() -> None:
    """1.47x at 1.11 tokens a step."""
    comparison = Comparison([run(1.47)] * 3, [run(1.0, steps=10)] * 3)
    assert comparison.speedups is not None
    assert comparison.speedups.median == pytest.approx(1.47)
    assert (comparison.is_noise, comparison.speedup) == (True, None)
    assert comparison.sentence().startswith("noise: measured 1.47x (1.47 to 1.47 over 3 pairs of runs), but 1.11")


def test_one_slow_run_does_not_make_a_result() -> None:
    """The median pair decides, and a spread on both sides of 1 is called no clear difference."""
    plain = [run(1.0), run(9.0), run(1.0)]
    speculative = [run(1.05, steps=6), run(1.0, steps=6), run(0.98, steps=6)]
    comparison = Comparison(plain, speculative)
    assert comparison.speedup == pytest.approx(1 / 0.98)
    assert comparison.sentence().startswith("no clear difference: 1.02x (0.95 to 9.00")


def test_outputs_that_differ_have_no_speed_up() -> None:
    comparison = Comparison([run(1.0)], [run(0.5, steps=5, token=8)])
    assert comparison.speedup is None
    assert "differ" in comparison.sentence()


def test_a_clear_gain_is_a_result() -> None:
    comparison = Comparison([run(1.0), run(1.1)], [run(0.5, steps=5), run(0.5, steps=5)])
    assert comparison.sentence() == "faster: 2.10x (2.00 to 2.20 over 2 pairs of runs)"
    assert comparison.speedup == pytest.approx(2.1)


def test_one_token_is_too_little_to_measure() -> None:
    def outputs() -> Iterator[RequestOutput]:
        yield RequestOutput("x", [7], finish_reason="length", stats=SpecStats(1, 1))

    single = TimedRun()
    list(timed(outputs(), single, lambda: 1.0))
    comparison = Comparison([single], [single])
    assert (comparison.speedups, comparison.is_noise, comparison.speedup) == (None, False, None)
    assert comparison.sentence() == "too few tokens to measure a speed-up"
