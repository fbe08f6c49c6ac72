"""Prompt lookup: longest match first, the latest of one length, several candidates as a tree."""

from __future__ import annotations

import pytest

from paceline.core.draft_tree import DraftTree
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.core.stopping import StopRules
from paceline.drafting.ngram import Ngram
from paceline.errors import OptionError


def seq(ids: list[int]) -> Sequence:
    return Sequence(ids, SamplingParams(), StopRules(100))


def guess(ids: list[int], budget: int, **options: int) -> DraftTree:
    drafter, one = Ngram(**options), seq(ids)
    drafter.begin(one, None)
    return drafter.propose([one], [budget])[0]


def test_it_continues_what_was_said_before() -> None:
    assert guess([1, 2, 3, 4, 5, 1, 2], 3).tokens.tolist() == [3, 4, 5]
    assert len(guess([1, 2, 3, 4, 5, 6], 3)) == 0
    assert len(guess([1, 2, 3, 1, 2], 0)) == 0


def test_the_longest_match_goes_before_the_latest() -> None:
    assert guess([1, 2, 3, 7, 9, 2, 3, 8, 9, 1, 2, 3], 1).tokens.tolist() == [7]
    assert guess([1, 2, 3, 7, 9, 2, 3, 8, 9, 1, 2, 3], 1, longest=2).tokens.tolist() == [8]


def test_a_run_may_be_continued_into_itself() -> None:
    assert guess([5, 5, 5, 5], 3, longest=2).tokens.tolist() == [5]
    assert guess([1, 2, 1, 2, 1, 2], 4).tokens.tolist() == [1, 2]


def test_branches_become_a_tree() -> None:
    tree = guess([1, 2, 3, 4, 1, 2, 3, 5, 1, 2], 4, branches=2)
    assert tree.tokens.tolist() == [3, 5, 1, 4] and tree.parents == [-1, 0, 1, 0]
    assert tree.probs is None, "chosen, not drawn"


def test_the_index_grows_with_the_text() -> None:
    drafter, one = Ngram(), seq([1, 2, 3])
    drafter.begin(one, None)
    assert len(drafter.propose([one], [2])[0]) == 0
    one.extend([9, 1, 2], accepted=0)
    assert drafter.propose([one], [2])[0].tokens.tolist() == [3, 9]


@pytest.mark.parametrize("options", [{"shortest": 0}, {"shortest": 5, "longest": 4}, {"branches": 0}])
def test_impossible_options(options: dict[str, int]) -> None:
    with pytest.raises(OptionError):
        Ngram(**options)
