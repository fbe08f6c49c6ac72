"""The prefix cache finds exactly what comparing with every entry finds, and gives up what it must in order of use."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.kv.prefix_cache import PrefixCache, PrefixEntry, common_prefix_length

BLOCK_SIZE = 4
TOKENS = st.lists(st.integers(0, 1), max_size=24)
OWNERS = st.sampled_from(["target", "draft"])


def entry(tokens: list[int], owner: str = "target", released: list[Any] | None = None, **flags: bool) -> PrefixEntry:
    """An entry that notes its release under its tokens."""
    notes = [] if released is None else released
    return PrefixEntry(owner, tokens, object(), release=lambda: notes.append(tokens), **flags)


@settings(max_examples=200, deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=8), TOKENS, st.sets(st.integers(0, 7)))
def test_the_longest_shared_prefix_is_found(cached: list[list[int]], tokens: list[int], removed: set[int]) -> None:
    cache = PrefixCache(BLOCK_SIZE)
    entries = [entry(ids) for ids in cached]
    for each in entries:
        cache.add(each)
    for index in removed & set(range(len(entries))):
        cache.remove(entries[index])
    kept = [each for index, each in enumerate(entries) if index not in removed]
    best = max((common_prefix_length(each.tokens, tokens) for each in kept), default=0)
    match = cache.longest("target", tokens)
    if best < BLOCK_SIZE:
        assert match is None
    else:
        assert match is not None and match.length == best
        assert match.entry in kept and match.lost == len(match.entry.tokens) - best


def test_a_match_across_blocks_ends_where_the_tokens_differ() -> None:
    cache = PrefixCache(BLOCK_SIZE)
    cache.add(entry([1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert cache.longest("target", [1, 2, 3, 4, 5, 6, 0]).length == 6  # type: ignore[union-attr]
    assert cache.longest("target", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]).length == 9  # type: ignore[union-attr]
    assert cache.longest("target", [1, 2, 3]) is None, "less than a block is not shared"


def test_owners_do_not_see_each_others_entries() -> None:
    cache = PrefixCache(BLOCK_SIZE)
    cache.add(entry([1, 2, 3, 4, 5], owner="draft"))
    assert cache.longest("target", [1, 2, 3, 4, 5]) is None
    cache.add(entry([1, 2, 3, 4, 9], owner="target"))
    match = cache.longest("draft", [1, 2, 3, 4, 9])
    assert match is not None and match.length == 4 and match.entry.owner == "draft"


def test_the_least_recently_used_goes_first_and_use_makes_recent() -> None:
    cache, released = PrefixCache(BLOCK_SIZE), []
    first, second, third = ([number] * 4 for number in (1, 2, 3))
    for tokens in (first, second, third):
        cache.add(entry(tokens, released=released))
    cache.use(cache.longest("target", first))  # type: ignore[arg-type]
    assert cache.evict("target") and released == [second]
    assert cache.evict("target") and cache.evict("target") and released == [second, third, first]
    assert not cache.evict("target")
    assert (cache.hits, cache.hit_tokens) == (1, 4)


def test_a_pinned_entry_is_found_and_never_evicted() -> None:
    cache, released = PrefixCache(BLOCK_SIZE, {"target": 4}), []
    cache.add(entry([1] * 40, released=released, pinned=True))
    cache.add(entry([2] * 4, released=released))
    assert cache.cached_tokens("target") == 4, "what a running sequence holds is not the cache's"
    cache.clear()
    assert released == [[2] * 4] and len(cache) == 1
    assert cache.longest("target", [1] * 8) is not None


def test_a_limit_holds_per_owner_and_the_oldest_make_room() -> None:
    cache, released = PrefixCache(BLOCK_SIZE, {"target": 8}), []
    for number in range(4):
        cache.add(entry([number] * 4, released=released))
    cache.add(entry([9] * 400, owner="draft", released=released))
    assert released == [[0] * 4, [1] * 4]
    assert cache.cached_tokens("target") == 8 and cache.cached_tokens("draft") == 400


def test_a_limit_of_nothing_releases_at_once() -> None:
    cache, released = PrefixCache(BLOCK_SIZE, {"target": 0}), []
    assert not cache.enabled("target") and cache.enabled("draft")
    cache.add(entry([1] * 8, released=released))
    assert released == [[1] * 8] and len(cache) == 0
    cache.limit("target", None)
    cache.add(entry([1] * 8, released=released))
    assert cache.enabled("target") and len(cache) == 1


def test_removing_does_not_release_and_removing_twice_is_harmless() -> None:
    cache, released = PrefixCache(BLOCK_SIZE), []
    only = entry([1] * 8, released=released)
    cache.add(only)
    cache.remove(only)
    cache.remove(only)
    assert not released and only not in cache and cache.longest("target", [1] * 8) is None


def test_no_node_is_kept_when_all_entries_are_gone() -> None:
    cache = PrefixCache(BLOCK_SIZE)
    for number in range(5):
        cache.add(entry([number % 2] * 20, owner="draft" if number % 2 else "target"))
    cache.clear("draft")
    assert len(cache) == 3
    cache.clear()
    assert len(cache) == 0 and not cache._root.children


@pytest.mark.parametrize(("tokens", "others", "length"), [([], [], 0), ([1, 2], [1, 3], 1), ([1, 2], [1, 2, 3], 2)])
def test_common_prefix_length(tokens: list[int], others: list[int], length: int) -> None:
    assert common_prefix_length(tokens, others) == common_prefix_length(others, tokens) == length


class AgainstADictionary(RuleBasedStateMachine):
    """Any order of additions, removals, uses and evictions leaves what a plain list of entries would hold."""

    LIMIT = 40

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(BLOCK_SIZE, {"target": self.LIMIT})
        self.entries: dict[str, list[PrefixEntry]] = {"target": [], "draft": []}  # least recently used first
        self.released: list[PrefixEntry] = []

    @rule(owner=OWNERS, tokens=TOKENS, pinned=st.booleans())
    def add(self, owner: str, tokens: list[int], pinned: bool) -> None:
        new = PrefixEntry(owner, tokens, None, release=lambda: self.released.append(new), pinned=pinned)
        self.cache.add(new)
        self.entries[owner].append(new)
        while owner == "target" and sum(len(each.tokens) for each in self._unpinned(owner)) > self.LIMIT:
            self.entries[owner].remove(self._unpinned(owner)[0])

    @rule(owner=OWNERS, index=st.integers(0, 9))
    def remove(self, owner: str, index: int) -> None:
        if index < len(self.entries[owner]):
            self.cache.remove(self.entries[owner].pop(index))

    @rule(owner=OWNERS)
    def evict(self, owner: str) -> None:
        unpinned = self._unpinned(owner)
        assert self.cache.evict(owner) == bool(unpinned)
        if unpinned:
            assert self.released[-1] is unpinned[0]
            self.entries[owner].remove(unpinned[0])

    @precondition(lambda self: any(self.entries.values()))
    @rule(owner=OWNERS, tokens=TOKENS)
    def use_the_longest(self, owner: str, tokens: list[int]) -> None:
        lengths = [common_prefix_length(each.tokens, tokens) for each in self.entries[owner]]
        match = self.cache.longest(owner, tokens)
        if max(lengths, default=0) < BLOCK_SIZE:
            assert match is None
            return
        assert match is not None and match.length == max(lengths)
        self.cache.use(match)
        self.entries[owner].remove(match.entry)
        self.entries[owner].append(match.entry)

    @invariant()
    def holds_what_the_dictionary_holds(self) -> None:
        assert len(self.cache) == sum(map(len, self.entries.values()))
        for owner, entries in self.entries.items():
            assert all(each in self.cache for each in entries)
            assert self.cache.cached_tokens(owner) == sum(len(each.tokens) for each in self._unpinned(owner))

    def _unpinned(self, owner: str) -> list[PrefixEntry]:
        return [each for each in self.entries[owner] if not each.pinned]


TestAgainstADictionary = AgainstADictionary.TestCase
TestAgainstADictionary.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
