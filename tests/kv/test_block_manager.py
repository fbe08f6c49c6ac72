"""Pages are handed out once, shared on purpose, and come back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import OutOfMemory
from paceline.kv.block_manager import BlockManager


def test_texts_that_grow_in_turns_keep_their_pages_together() -> None:
    pool = BlockManager(64, 16)
    for tokens in range(16, 16 * 9, 16):
        for holder in "abc":
            pool.grow(holder, tokens)
    for holder in "abc":
        table = pool.table(holder)
        assert table == list(range(table[0], table[0] + 8))


def test_out_of_pages_changes_nothing() -> None:
    pool = BlockManager(4, 16)
    pool.grow("a", 40)
    with pytest.raises(OutOfMemory, match="needs 2"):
        pool.grow("b", 30)
    assert pool.free == 1 and pool.table("b") == []


def test_a_shared_page_is_copied_before_it_is_written() -> None:
    pool = BlockManager(8, 16)
    pool.grow("a", 40)
    pool.share("a", "b", 40)
    assert pool.used == 3
    copies = pool.writable("b", 40, 48)
    assert [copy.source for copy in copies] == [pool.table("a")[2]]
    assert pool.table("b")[:2] == pool.table("a")[:2] and pool.table("b")[2] != pool.table("a")[2]
    assert pool.writable("b", 40, 48) == []
    pool.release("a")
    pool.release("b")
    assert pool.free == 8


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 200)), max_size=60))
def test_no_page_has_two_owners_and_none_is_lost(moves: list[tuple[str, int]]) -> None:
    pool = BlockManager(20, 16)
    for holder, tokens in moves:
        if tokens % 5 == 0:
            pool.shrink(holder, tokens // 2)
        else:
            try:
                pool.grow(holder, tokens)
            except OutOfMemory:
                pool.release(holder)
    held = [block for holder in "abcd" for block in pool.table(holder)]
    assert len(held) == len(set(held)) == pool.used
    for holder in "abcd":
        pool.release(holder)
    assert pool.free == 20
