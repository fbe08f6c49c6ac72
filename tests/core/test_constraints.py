"""Masks along a path: lists of tokens, forbidden words, several rules at once."""

from __future__ import annotations

from paceline.core.constraints import AllConstraints, AllowedTokens, BannedWords
from paceline.core.sequence import Constraint, MinNewTokens

VOCABULARY = 5


def tokens(constraint: Constraint, path: list[int] | None = None) -> list[int]:
    allowed: list[int] = constraint.allowed(path or []).nonzero().flatten().tolist()
    return allowed


def test_only_listed_tokens_are_allowed() -> None:
    constraint = AllowedTokens((1, 3), VOCABULARY)
    constraint.advance([1])
    assert tokens(constraint) == tokens(constraint, [1, 3]) == [1, 3]


def test_the_last_token_of_a_word_may_not_follow_the_others() -> None:
    constraint = BannedWords([(1, 2, 3), (0,)], VOCABULARY)
    assert tokens(constraint) == [1, 2, 3, 4], "a word of one token is never allowed"
    assert tokens(constraint, [1, 2]) == [1, 2, 4]
    assert tokens(constraint, [2, 2]) == [1, 2, 3, 4]
    constraint.advance([4, 1])
    assert tokens(constraint, [2]) == [1, 2, 4], "a word may begin before the path"
    assert tokens(constraint) == [1, 2, 3, 4], "asking changes nothing"


def test_a_word_that_repeats_itself_is_found_in_every_place() -> None:
    constraint = BannedWords([(1, 1)], VOCABULARY)
    constraint.advance([1])
    assert tokens(constraint) == [0, 2, 3, 4]
    constraint.advance([2])
    assert tokens(constraint) == [0, 1, 2, 3, 4]


def test_several_rules_hold_together() -> None:
    constraint = AllConstraints([AllowedTokens((1, 2), VOCABULARY), BannedWords([(1, 2)], VOCABULARY)])
    assert tokens(constraint) == [1, 2] and tokens(constraint, [1]) == [1]
    constraint.advance([1])
    assert tokens(constraint) == [1]


def test_a_rule_that_would_leave_nothing_is_passed_over() -> None:
    only_end = AllConstraints([AllowedTokens((4,), VOCABULARY), MinNewTokens(2, frozenset({4}), VOCABULARY)])
    assert tokens(only_end) == [4], "the stronger rule comes first"
