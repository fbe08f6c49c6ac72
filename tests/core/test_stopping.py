"""End tokens, stop strings and lengths, also inside an accepted run."""

from __future__ import annotations

from paceline.core.stopping import Stop, StopRules

LETTERS = "abcdefghij"


def decode(ids: list[int]) -> str:
    return "".join(LETTERS[token] for token in ids)


def test_an_end_token_inside_a_run_cuts_there() -> None:
    assert StopRules(99, frozenset({5})).check([1, 2, 5, 7], new=3) == Stop(3, "stop")


def test_only_fresh_tokens_are_looked_at() -> None:
    assert StopRules(99, frozenset({5})).check([5, 1, 2], new=2) is None


def test_the_length_cuts_inside_a_run() -> None:
    assert StopRules(3).check([1, 2, 3, 4, 5], new=3) == Stop(3, "length")


def test_an_end_token_at_the_last_place_is_a_stop() -> None:
    assert StopRules(3, frozenset({9})).check([1, 2, 9], new=1) == Stop(3, "stop")


def test_a_stop_string_over_several_tokens() -> None:
    rules = StopRules(99, stop_strings=("cde",), decode=decode)
    assert rules.check([0, 1, 2, 3], new=1) is None
    assert rules.check([0, 1, 2, 3, 4, 5], new=2) == Stop(5, "stop")


def test_a_stop_token_ends_a_sequence_and_is_the_reason() -> None:
    rules = StopRules(99, frozenset({5}), stop_token_ids=frozenset({3}))
    assert rules.check([1, 3, 2], new=2) == Stop(2, "stop")
    assert rules.stop_reason([1, 3]) == 3 and rules.stop_reason([1, 5]) is None


def test_the_reason_of_a_stop_string_is_the_one_that_comes_first() -> None:
    rules = StopRules(99, stop_strings=("ef", "de"), decode=decode)
    assert rules.stop_reason([1, 2, 3, 4, 5]) == "de" and rules.stop_reason([0, 4, 5]) == "ef"
