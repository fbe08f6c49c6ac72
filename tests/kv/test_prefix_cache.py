"""The index must find exactly what comparing with every holder finds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.kv.prefix_cache import common_prefix_length
from paceline.kv.prefix_index import PrefixIndex

BLOCK_SIZE = 4
TEXTS = st.lists(st.lists(st.integers(0, 1), max_size=24), min_size=1, max_size=8)


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 1), max_size=24), st.sets(st.integers(0, 7)))
def test_the_longest_beginning_is_found(texts: list[list[int]], asked: list[int], removed: set[int]) -> None:
    index = PrefixIndex(BLOCK_SIZE)
    for holder, tokens in enumerate(texts):
        index.add(holder, tokens)
    for holder in removed:
        index.remove(holder)
    left = {holder: tokens for holder, tokens in enumerate(texts) if holder not in removed}
    best = max((common_prefix_length(tokens, asked) for tokens in left.values()), default=0)
    found = index.longest(asked)
    if best < BLOCK_SIZE:
        assert found is None
    else:
        assert found is not None and found.length == best
        assert common_prefix_length(left[found.holder], asked) == best


def test_adding_again_replaces() -> None:
    index = PrefixIndex(BLOCK_SIZE)
    index.add("a", [1, 2, 3, 4, 5, 6])
    index.add("a", [9, 9, 9, 9])
    assert index.longest([1, 2, 3, 4, 5]) is None
    assert index.length("a") == 4 and len(index) == 1


def test_the_oldest_goes_first_and_use_makes_young() -> None:
    index = PrefixIndex(BLOCK_SIZE)
    for holder in "abc":
        index.add(holder, [1, 2, 3, 4])
    index.touch("a")
    assert index.oldest({"a", "b", "c"}) == "b"
    assert index.oldest({"a", "c"}) == "c"
    assert index.oldest(set()) is None


def test_nothing_is_left_when_all_are_removed() -> None:
    index = PrefixIndex(BLOCK_SIZE)
    for holder in range(5):
        index.add(holder, [holder % 2] * 20)
    for holder in range(5):
        index.remove(holder)
    assert len(index) == 0 and not index._top.children and not index._top.holders
