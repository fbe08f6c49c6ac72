"""Caches of sequences that are over: taken over, forked, and evicted when room is needed; a draft that uses them."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import SpeculativeDecoder
from paceline.core.draft_length import FixedDraftLength
from paceline.core.types import ModelOutput, Row, SequenceCache
from paceline.drafting import draft_kv
from paceline.drafting.draft_kv import DraftKV
from paceline.drafting.draft_model import DraftModel
from paceline.errors import OutOfMemory
from paceline.kv.block_manager import BLOCK_SIZE
from paceline.kv.prefix_cache import PrefixCache
from paceline.runners.table import TableRunner
from tests.support.build import sequence, toy_engine

LONG = [number % 3 for number in range(4 * BLOCK_SIZE)]


class CountingRunner(TableRunner):
    """Counts the tokens it reads and the caches it frees."""

    def __init__(self) -> None:
        super().__init__(vocab_size=4, order=2, seed=5)
        self.num_read, self.capacity = 0, 1 << 30
        self.freed: list[SequenceCache] = []

    def forward(self, rows: list[Row], *, last_only: bool = False) -> ModelOutput:
        self.num_read += sum(len(row.parents) for row in rows)
        return super().forward(rows, last_only=last_only)

    def free(self, seq_cache: SequenceCache) -> None:
        self.freed.append(seq_cache)
        super().free(seq_cache)

    def free_tokens(self) -> int:
        return self.capacity


def filled(runner: TableRunner, ids: list[int]) -> SequenceCache:
    seq_cache = runner.new_cache()
    runner.forward([Row.chain(seq_cache, ids)], last_only=True)
    runner.commit(seq_cache, list(range(len(ids))))
    return seq_cache


def test_the_next_turn_takes_the_cache_over_and_another_sequence_gets_a_fork() -> None:
    runner, prefix_cache = CountingRunner(), PrefixCache()
    kv = DraftKV(runner, "draft", prefix_cache)
    seq_cache = filled(runner, LONG)
    kv.keep(LONG, seq_cache)
    other = kv.open([*LONG[: 2 * BLOCK_SIZE], 3, 3, 3])
    assert other is not seq_cache and other.length == 2 * BLOCK_SIZE and len(prefix_cache) == 1
    again = kv.open([*LONG, 3, 3])
    assert again is seq_cache and again.length == len(LONG) and len(prefix_cache) == 0
    assert prefix_cache.hits == 2


def test_the_last_token_of_a_sequence_is_always_read_again() -> None:
    runner = CountingRunner()
    kv = DraftKV(runner, "draft")
    kv.keep(LONG, filled(runner, LONG))
    assert kv.open(LONG).length == len(LONG) - 1


def test_a_prefix_below_a_block_is_not_kept_and_the_oldest_is_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_kv, "MAX_CACHED_TOKENS", len(LONG) + 1)
    runner, prefix_cache = CountingRunner(), PrefixCache()
    kv = DraftKV(runner, "draft", prefix_cache)
    first, second = filled(runner, LONG), filled(runner, [3, *LONG])
    kv.keep(LONG, first)
    kv.keep([3, *LONG], second)
    assert len(prefix_cache) == 1 and runner.freed == [first]
    assert kv.open([*LONG, 1]).length == 0
    kv.keep(LONG[: BLOCK_SIZE - 1], filled(runner, LONG[: BLOCK_SIZE - 1]))
    assert len(prefix_cache) == 1 and len(runner.freed) == 2, "a short sequence is not kept"


def test_kept_caches_make_room() -> None:
    runner, prefix_cache = CountingRunner(), PrefixCache()
    kv = DraftKV(runner, "draft", prefix_cache)
    kv.keep(LONG, filled(runner, LONG))
    kv.make_room(1000)
    assert len(prefix_cache) == 1
    runner.capacity = 10
    kv.make_room(1000)
    assert len(prefix_cache) == 0 and len(runner.freed) == 1


def test_a_cache_that_cannot_be_copied_is_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, prefix_cache = CountingRunner(), PrefixCache()
    kv = DraftKV(runner, "draft", prefix_cache)
    seq_cache = filled(runner, LONG)
    kv.keep(LONG, seq_cache)

    def full(seq_cache: SequenceCache, length: int) -> SequenceCache:
        raise OutOfMemory("the cache has no free block")

    monkeypatch.setattr(runner, "fork", full)
    opened = kv.open([*LONG[: 2 * BLOCK_SIZE], 3, 3, 3])
    assert opened is seq_cache and opened.length == 2 * BLOCK_SIZE and len(prefix_cache) == 0


def test_the_first_steps_that_fit_have_room() -> None:
    runner = CountingRunner()
    kv = DraftKV(runner, "draft")
    runner.capacity = 100
    assert kv.fitting([60, 60, 40]) == [True, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("runner", ["native", "hf"])
def test_a_full_cache_of_the_draft_model_costs_drafts_and_says_nothing(
    runner: str, tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts that share a long prefix, in caches with room for few of them: plain decoding's texts, and no warning."""
    shared = [place % 200 for place in range(6 * BLOCK_SIZE)]
    prompts = [[*shared[: (2 + place % 4) * BLOCK_SIZE], place, place + 1] for place in range(8)]
    options = {"runner": runner, "kv_cache_tokens": 16 * BLOCK_SIZE}
    with SpeculativeDecoder(str(tiny_folder), **options) as plain:
        expected = [result.token_ids for result in plain.generate(prompts, max_new_tokens=20, ignore_eos=True)]
    with SpeculativeDecoder(str(tiny_folder), draft_model=str(tiny_folder), num_draft_tokens=4, **options) as decoder:
        for _ in range(2):  # the second time the prefixes are in the cache
            results = decoder.generate(prompts, max_new_tokens=20, ignore_eos=True)
            assert [result.token_ids for result in results] == expected
        assert sum(result.stats.accepted for result in results) > 0
    assert [record.getMessage() for record in caplog.records if "drafter" in record.getMessage()] == []


def ids_after(drafter: DraftModel, ids: list[int], *, keep: bool) -> list[int]:
    options = {} if keep else {"prefix_cache_tokens": 0}
    seq = sequence(ids, 12)
    toy_engine(TableRunner(vocab_size=4, order=2, seed=5), drafter, FixedDraftLength(3), **options).run([seq])
    return seq.ids


@pytest.mark.parametrize("keep", [True, False])
def test_a_draft_model_reads_a_conversation_once(keep: bool) -> None:
    runner = CountingRunner()
    drafter = DraftModel(runner, 4)
    first = ids_after(drafter, LONG, keep=keep)
    runner.num_read = 0
    second = ids_after(drafter, [*first, 1, 2], keep=keep)
    assert second == ids_after(DraftModel(CountingRunner(), 4), [*first, 1, 2], keep=False)
    assert (runner.num_read < BLOCK_SIZE + 20) == keep, f"{runner.num_read} tokens were read"
