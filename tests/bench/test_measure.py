"""One stopwatch and one counter for plain and speculative decoding."""

from __future__ import annotations

import pytest

from paceline.bench.measure import OutputLength
from tests.support.bench_toys import CONTEXT, measured_engine, toy_candidates


def test_both_sides_are_counted_alike_and_the_output_is_the_same() -> None:
    candidates = toy_candidates()
    plain = measured_engine(candidates, "none").run([CONTEXT], OutputLength(20))
    speculative = measured_engine(candidates, "draft_model", 3).run([CONTEXT], OutputLength(20))
    assert plain.outputs == speculative.outputs
    assert plain.stats.new_tokens == speculative.stats.new_tokens == 20
    assert plain.stats.steps == 20
    assert speculative.stats.steps + speculative.stats.accepted == 20
    assert sum(step.accepted for step in speculative.steps) == speculative.stats.accepted
    spent = speculative.draft_seconds + speculative.verify_seconds + speculative.other_seconds
    assert spent == pytest.approx(speculative.stats.seconds)


def test_a_prompt_that_comes_again_is_read_again() -> None:
    """With a prefix cache the second run of a prompt would measure less work than the first."""
    prompt = CONTEXT * 20
    engine = measured_engine(toy_candidates(), "none")
    first, second = (engine.run([prompt], OutputLength(4)) for _ in range(2))
    assert engine.stats().prefix_tokens == 0
    assert first.outputs == second.outputs


def test_each_run_has_its_own_steps() -> None:
    engine = measured_engine(toy_candidates(), "draft_model", 2)
    first, second = (engine.run([CONTEXT], OutputLength(8)) for _ in range(2))
    assert first.steps == second.steps
    assert len(first.timings) == len(second.timings) == first.stats.steps
