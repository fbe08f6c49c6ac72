"""Blocks are given out once, shared on purpose, and come back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import OutOfMemory
from paceline.kv.block_manager import BlockManager


def test_sequences_that_grow_in_turns_keep_neighbouring_blocks() -> None:
    blocks = BlockManager(64, 16)
    for tokens in range(16, 16 * 9, 16):
        for holder in "abc":
            blocks.grow(holder, tokens)
    for holder in "abc":
        table = blocks.table(holder)
        assert table == list(range(table[0], table[0] + 8))


def test_running_out_of_blocks_changes_nothing() -> None:
    blocks = BlockManager(4, 16)
    blocks.grow("a", 40)
    with pytest.raises(OutOfMemory, match="needs 2"):
        blocks.grow("b", 30)
    assert blocks.free == 1 and blocks.table("b") == []


def test_a_shared_block_is_copied_before_it_is_written() -> None:
    blocks = BlockManager(8, 16)
    blocks.grow("a", 40)
    blocks.share("a", "b", 40)
    assert blocks.used == 3
    copies = blocks.writable("b", 40, 48)
    assert [copy.source for copy in copies] == [blocks.table("a")[2]]
    assert blocks.table("b")[:2] == blocks.table("a")[:2] and blocks.table("b")[2] != blocks.table("a")[2]
    assert blocks.writable("b", 40, 48) == []
    blocks.release("a")
    blocks.release("b")
    assert blocks.free == 8


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 200)), max_size=60))
def test_no_block_has_two_holders_and_none_is_lost(moves: list[tuple[str, int]]) -> None:
    blocks = BlockManager(20, 16)
    for holder, tokens in moves:
        if tokens % 5 == 0:
            blocks.shrink(holder, tokens // 2)
        else:
            try:
                blocks.grow(holder, tokens)
            except OutOfMemory:
                blocks.release(holder)
    held = [block for holder in "abcd" for block in blocks.table(holder)]
    assert len(held) == len(set(held)) == blocks.used
    for holder in "abcd":
        blocks.release(holder)
    assert blocks.free == 20


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["grow", "share", "write", "shrink", "release"]), st.sampled_from("abcd"),
                          st.sampled_from("abcd"), st.integers(0, 120)), max_size=40))  # fmt: skip
def test_shared_blocks_count_once_and_a_written_block_has_one_holder(moves: list[tuple[str, str, str, int]]) -> None:
    blocks = BlockManager(20, 16)
    for move, holder, other, tokens in moves:
        try:
            if move == "grow":
                blocks.grow(holder, tokens)
            elif move == "share" and not blocks.table(other):
                blocks.share(holder, other, tokens)
            elif move == "write":
                blocks.writable(holder, 0, tokens)
                written = blocks.table(holder)[: blocks.needed(tokens)]
                others = {block for name in "abcd" if name != holder for block in blocks.table(name)}
                assert not others & set(written)
            elif move == "shrink":
                blocks.shrink(holder, tokens)
            elif move == "release":
                blocks.release(holder)
        except OutOfMemory:
            blocks.release(holder)
        assert blocks.used == len({block for name in "abcd" for block in blocks.table(name)})
    for holder in "abcd":
        blocks.release(holder)
    assert blocks.free == 20


def test_a_copy_that_finds_no_free_block_runs_out_of_memory() -> None:
    blocks = BlockManager(2, 16)
    blocks.grow("a", 32)
    blocks.share("a", "b", 32)
    with pytest.raises(OutOfMemory, match="--kv-cache-tokens"):
        blocks.writable("b", 0, 1)


def test_releasing_twice_is_harmless() -> None:
    blocks = BlockManager(4, 16)
    blocks.grow("a", 20)
    blocks.release("a")
    blocks.release("a")
    assert blocks.free == 4 and blocks.table("a") == []
