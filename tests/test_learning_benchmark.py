"""benchmarks/learning.py: what its last lines may claim."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.learning import LEAST_RISE, parse, prompts, summary
from benchmarks.learning_sides import Answer, Killing


def answers(*, rise: float = 0.0, factor: float = 1.0, text: str = "a", rounds: int = 20) -> list[Answer]:
    """50 requests a round, of which each takes a little longer than the one before."""
    numbers = range(50 * rounds)
    accepted = [int(100 * (0.4 + rise * number / len(numbers))) for number in numbers]
    return [
        Answer(number, number // 50, text, factor * (1 + number % 50 / 100), accepted[number], 100)
        for number in numbers
    ]


def failed(without: list[Answer], learning: list[Answer], *killings: Killing) -> list[str]:
    result = summary(without, learning, list(killings))
    return [claim for claim, holds in result["claims"].items() if not holds]


def test_every_claim_holds_where_all_is_well() -> None:
    assert not failed(answers(), answers(rise=0.2), Killing(500, 480, 1, 1, 5.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "claim"),
    [
        ({"rise": LEAST_RISE / 2}, "acceptance at position 1 rises"),
        ({"rise": 0.2, "factor": 1.1}, "p99 is at most"),
        ({"rise": 0.2, "text": "b"}, "no text differs"),
    ],
)
def test_a_claim_that_does_not_hold_is_named(wrong: dict[str, Any], claim: str) -> None:
    [named] = failed(answers(), answers(**wrong))
    assert named.startswith(claim)


@pytest.mark.slow
def test_a_head_that_a_kill_has_lost_is_named() -> None:
    [named] = failed(answers(), answers(rise=0.2), Killing(500, 480, 2, 0, 5.0))
    assert "a kill keeps the head" in named


@pytest.mark.slow
def test_the_interval_of_the_ratio_holds_the_ratio_and_kills_do_not_count() -> None:
    learning = answers(rise=0.2, factor=1.02)
    late = [Answer(answer.number, answer.round, "a", 60.0, 1, 2, timed=False) for answer in learning[:50]]
    ratio = summary(answers(), [*late, *learning[50:]], [])["p99_ratio"]
    assert ratio["ratio"] == pytest.approx(1.02, abs=1e-3) and ratio["low"] <= ratio["ratio"] <= ratio["high"]


def test_there_are_as_many_different_prompts_as_requests() -> None:
    assert len(set(prompts())) == parse(["--out", "x"]).requests == 2000
