"""Layers with a window keep little more than it, give up the rest when the pool is short, and say what they lack."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import OutOfMemory
from paceline.kv.window_blocks import WindowBlocks, window_pool_tokens

BLOCK, WINDOW = 4, 6


def read(blocks: WindowBlocks, holder: str, start: int, end: int, others: dict[str, int] | None = None) -> None:
    blocks.reserve(holder, end, {holder: start, **(others or {})})


def test_a_sequence_of_any_length_fits_a_pool_of_little_more_than_its_window() -> None:
    blocks = WindowBlocks(5, WINDOW, BLOCK)
    for token in range(1000):
        read(blocks, "a", token, token + 1)
        assert not blocks.lacks("a", token + 1)
    assert blocks.used == 5 and len(blocks.table("a")) == 250
    assert set(blocks.table("a")[:245]) == {blocks.gone}


def test_nothing_is_given_up_while_there_is_room() -> None:
    blocks = WindowBlocks(30, WINDOW, BLOCK)
    read(blocks, "a", 0, 80)
    blocks.share("a", "b", 40)
    assert blocks.gone not in blocks.table("a") and not blocks.lacks("b", 40)


def test_a_fork_from_the_middle_says_what_its_parent_has_given_up() -> None:
    blocks = WindowBlocks(8, WINDOW, BLOCK)
    for start in range(0, 80, BLOCK):
        read(blocks, "a", start, start + BLOCK)
    blocks.share("a", "b", 40)
    assert blocks.lacks("b", 40) and not blocks.lacks("a", 80)
    blocks.share("a", "c", 80)
    assert not blocks.lacks("c", 80)


def test_a_shared_block_is_copied_before_it_is_written() -> None:
    blocks = WindowBlocks(8, WINDOW, BLOCK)
    read(blocks, "a", 0, 10)
    blocks.share("a", "b", 10)
    [copy] = blocks.reserve("b", 11, {"b": 10})
    assert copy.source == blocks.table("a")[2] and copy.target == blocks.table("b")[2] != copy.source


def test_the_sequences_of_a_pass_keep_their_windows_and_the_least_recent_other_gives_up_its_own() -> None:
    blocks = WindowBlocks(12, WINDOW, BLOCK)
    for holder in "abc":
        read(blocks, holder, 0, 16)
    read(blocks, "a", 16, 40, {"c": 16})
    assert blocks.lacks("b", 16) and not blocks.lacks("a", 40) and not blocks.lacks("c", 16)


def test_a_pass_that_does_not_fit_takes_nothing_from_its_own_sequences() -> None:
    blocks = WindowBlocks(6, WINDOW, BLOCK)
    read(blocks, "a", 0, 12)
    read(blocks, "b", 0, 12, {"a": 12})
    with pytest.raises(OutOfMemory, match="sliding windows"):
        read(blocks, "b", 12, 16, {"a": 12})
    assert not blocks.lacks("a", 12) and not blocks.lacks("b", 12)


def test_the_pool_is_never_larger_than_the_cache_and_far_smaller_than_a_large_one() -> None:
    assert window_pool_tokens(192, 16) == 192
    assert window_pool_tokens(65536, 128) < 65536 / 5
    assert window_pool_tokens(1 << 20, 1024) < (1 << 20) / 3


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 9), st.sampled_from(["read", "cut", "fork"]))))
def test_no_block_is_lost_or_held_twice_without_being_shared(moves: list[tuple[str, int, str]]) -> None:
    blocks, lengths = WindowBlocks(16, WINDOW, BLOCK), dict.fromkeys("abcd", 0)
    for holder, count, move in moves:
        if move == "cut":
            lengths[holder] = max(0, lengths[holder] - count)
            blocks.shrink(holder, lengths[holder])
        elif move == "fork":
            blocks.release("d")
            blocks.share("a", "d", lengths["a"])
            lengths["d"] = lengths["a"]
        else:
            was_whole = not blocks.lacks(holder, lengths[holder])
            read(blocks, holder, lengths[holder], lengths[holder] + count)
            lengths[holder] += count
            assert was_whole is not blocks.lacks(holder, lengths[holder]) or count >= WINDOW
    held = {block for holder in "abcd" for block in blocks.table(holder)} - {blocks.gone}
    assert len(held) == blocks.used
    for holder in "abcd":
        blocks.release(holder)
    assert blocks.free == 16
