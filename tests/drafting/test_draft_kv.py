"""Slots of texts that are over: taken over, forked, and given up when room is needed. And a draft that uses them."""

from __future__ import annotations

import pytest
from paceline.drafting.draft_prefix_cache import DraftPrefixCache
from paceline.engines.local.generate import run
from paceline.engines.local.step import EngineParts

from paceline.core.draft_length import FixedDraftLength
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.core.stopping import StopRules
from paceline.core.types import ModelOutput, Row, SequenceCache
from paceline.drafting.draft_model import DraftModel
from paceline.engines.local.verifier import Verifier
from paceline.kv.block_manager import BLOCK_SIZE as TILE
from paceline.runners.table import TableRunner

LONG = [seq_id % 3 for seq_id in range(4 * TILE)]


class CountingRunner(TableRunner):
    """Counts the tokens it reads; and its room is not endless."""

    def __init__(self) -> None:
        super().__init__(vocab_size=4, order=2, seed=5)
        self.read, self.stored = 0, 1 << 30
        self.closed: list[SequenceCache] = []

    def forward(self, rows: list[Row], *, last_only: bool = False) -> ModelOutput:
        self.read += sum(len(row.parents) for row in rows)
        return super().forward(rows, last_only=last_only)

    def close(self, seq_cache: SequenceCache) -> None:
        self.closed.append(seq_cache)
        super().close(seq_cache)

    def room(self) -> int:
        return self.stored


def filled(runner: TableRunner, ids: list[int]) -> SequenceCache:
    seq_cache = runner.new_cache()
    runner.forward([Row.chain(seq_cache, ids)], last_only=True)
    runner.commit(seq_cache, list(range(len(ids))))
    return seq_cache


def test_the_next_turn_takes_the_slot_over_and_another_text_gets_a_fork() -> None:
    runner = CountingRunner()
    residents = DraftPrefixCache(runner)
    seq_cache = filled(runner, LONG)
    residents.keep(LONG, seq_cache)
    other = residents.open([*LONG[: 2 * TILE], 3, 3, 3])
    assert other is not seq_cache and other.length == 2 * TILE and len(residents) == 1
    again = residents.open([*LONG, 3, 3])
    assert again is seq_cache and again.length == len(LONG) and len(residents) == 0


def test_the_last_token_of_a_text_is_always_read_anew() -> None:
    runner = CountingRunner()
    residents = DraftPrefixCache(runner)
    residents.keep(LONG, filled(runner, LONG))
    assert residents.open(LONG).length == len(LONG) - 1


def test_little_in_common_is_not_worth_it_and_the_oldest_goes() -> None:
    runner = CountingRunner()
    residents = DraftPrefixCache(runner, most=1)
    first, second = filled(runner, LONG), filled(runner, [3, *LONG])
    residents.keep(LONG, first)
    residents.keep([3, *LONG], second)
    assert len(residents) == 1 and runner.closed == [first]
    assert residents.open([*LONG, 1]).length == 0
    residents.keep(LONG[: TILE - 1], filled(runner, LONG[: TILE - 1]))
    assert len(residents) == 1 and len(runner.closed) == 2, "a short text is not kept"


def test_they_make_room() -> None:
    runner = CountingRunner()
    residents = DraftPrefixCache(runner)
    residents.keep(LONG, filled(runner, LONG))
    residents.make_room(1000)
    assert len(residents) == 1
    runner.stored = 10
    residents.make_room(1000)
    assert len(residents) == 0


def written(drafter: DraftModel, ids: list[int], *, keep: bool) -> list[int]:
    seq = Sequence(ids, SamplingParams(), StopRules(12))
    for _ in run(
        [seq], EngineParts(TableRunner(vocab_size=4, order=2, seed=5), drafter, FixedDraftLength(3), Verifier()), keep_caches=keep
    ):
        pass
    return seq.ids


@pytest.mark.parametrize("keep", [True, False])
def test_a_draft_reads_a_conversation_once(keep: bool) -> None:
    runner = CountingRunner()
    drafter = DraftModel(runner, 4)
    first = written(drafter, LONG, keep=keep)
    runner.read = 0
    second = written(drafter, [*first, 1, 2], keep=keep)
    assert second == written(DraftModel(CountingRunner(), 4), [*first, 1, 2], keep=False)
    assert (runner.read < TILE + 20) == keep, f"{runner.read} tokens were read"
