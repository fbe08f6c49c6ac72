"""Prompt lookup: longest match first, the latest of one length, several candidates as a tree."""

from __future__ import annotations

import pytest

from paceline.core.draft_tree import DraftTree
from paceline.core.sequence import Sequence
from paceline.drafting.ngram import Ngram
from paceline.errors import OptionError
from tests.support.build import sequence


def sequence_of(ids: list[int]) -> Sequence:
    return sequence(ids, 100)


def drafted(ids: list[int], num_draft_tokens: int, **options: int) -> DraftTree:
    drafter, seq = Ngram(**options), sequence_of(ids)
    drafter.begin(seq, None)
    return drafter.propose([seq], [num_draft_tokens])[0]


def test_it_repeats_what_followed_before() -> None:
    assert drafted([1, 2, 3, 4, 5, 1, 2], 3).tokens.tolist() == [3, 4, 5]
    assert len(drafted([1, 2, 3, 4, 5, 6], 3)) == 0
    assert len(drafted([1, 2, 3, 1, 2], 0)) == 0


def test_the_longest_match_goes_before_the_latest() -> None:
    assert drafted([1, 2, 3, 7, 9, 2, 3, 8, 9, 1, 2, 3], 1).tokens.tolist() == [7]
    assert drafted([1, 2, 3, 7, 9, 2, 3, 8, 9, 1, 2, 3], 1, longest=2).tokens.tolist() == [8]


def test_a_run_may_be_continued_into_itself() -> None:
    assert drafted([5, 5, 5, 5], 3, longest=2).tokens.tolist() == [5]
    assert drafted([1, 2, 1, 2, 1, 2], 4).tokens.tolist() == [1, 2]


def test_branches_become_a_tree() -> None:
    tree = drafted([1, 2, 3, 4, 1, 2, 3, 5, 1, 2], 4, branches=2)
    assert tree.tokens.tolist() == [3, 5, 1, 4] and tree.parents == [-1, 0, 1, 0]
    assert tree.probs is None, "chosen, not drawn"


def test_the_index_grows_with_the_sequence() -> None:
    drafter, seq = Ngram(), sequence_of([1, 2, 3])
    drafter.begin(seq, None)
    assert len(drafter.propose([seq], [2])[0]) == 0
    seq.extend([9, 1, 2], accepted=0)
    assert drafter.propose([seq], [2])[0].tokens.tolist() == [3, 9]


@pytest.mark.parametrize("options", [{"shortest": 0}, {"shortest": 5, "longest": 4}, {"branches": 0}])
def test_impossible_options_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(OptionError):
        Ngram(**options)
