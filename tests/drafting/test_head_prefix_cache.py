"""What a head keeps of texts that are over: the longest match is found, and old ones make room."""

from __future__ import annotations

import torch

from paceline.drafting.head_prefix_cache import HeadPrefix, HeadPrefixCache
from paceline.heads.attention import KeyValues


def seq(ids: list[int], entries: int | None = None, shift: int = 0) -> HeadPrefix:
    rows = torch.arange(len(ids) - 1 if entries is None else entries).float().view(1, -1, 1)
    return HeadPrefix(ids, shift, KeyValues(rows + ids[0], rows))


def found(kept: HeadPrefixCache, ids: list[int], *running: HeadPrefix) -> int:
    entries = kept.longest(ids, running)
    return 0 if entries is None else entries.keys.shape[1]


def test_the_longest_beginning_is_found_among_old_and_running_texts() -> None:
    kept = HeadPrefixCache()
    kept.add(seq([1, 2, 3, 4]))
    kept.add(seq([1, 2, 9, 9, 9]))
    assert found(kept, [1, 2, 3, 4, 5]) == 3
    assert found(kept, [1, 2, 9, 9, 8]) == 3
    assert found(kept, [1, 2, 3, 4, 5], seq([1, 2, 3, 4, 5, 6])) == 4
    assert found(kept, [7, 1, 2, 3]) == 0


def test_entries_of_later_places_need_more_tokens_in_common() -> None:
    assert seq([1, 2, 3, 4, 5], entries=2, shift=2).good_for([1, 2, 3, 4]) == 1
    assert seq([1, 2, 3, 4, 5], entries=2, shift=2).good_for([1, 2]) == 0


def test_the_next_turn_replaces_the_one_before_and_the_oldest_goes() -> None:
    kept = HeadPrefixCache(most_tokens=9)
    kept.add(seq([1, 2, 3]))
    kept.add(seq([1, 2, 3, 4]))
    assert len(kept) == 1
    kept.add(seq([5, 6, 7]))
    assert found(kept, [1, 2, 3, 4]) == 3  # used: now [5, 6, 7] is the oldest
    kept.add(seq([8, 9, 8, 9]))
    assert (len(kept), found(kept, [5, 6, 7]), found(kept, [1, 2, 3, 4])) == (2, 0, 3)


def test_what_is_kept_outlives_its_buffer() -> None:
    lent = seq([1, 2, 3])
    kept = HeadPrefixCache()
    kept.add(lent.clone())
    lent.keys.keys.zero_()
    entries = kept.longest([1, 2, 3])
    assert entries is not None and entries.keys.flatten().tolist() == [1.0, 2.0]
