"""Caches of sequences that are over: taken over, forked, and evicted when room is needed; a draft that uses them."""

from __future__ import annotations

import pytest

from paceline.core.draft_length import FixedDraftLength
from paceline.core.types import ModelOutput, Row, SequenceCache
from paceline.drafting import draft_kv
from paceline.drafting.draft_kv import DraftKV
from paceline.drafting.draft_model import DraftModel
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
