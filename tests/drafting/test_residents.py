"""Slots of texts that are over: taken over, forked, and given up when room is needed. And a draft that uses them."""

from __future__ import annotations

import pytest

from paceline.core.budget import FixedBudget
from paceline.core.distribution import SamplingParams
from paceline.core.protocols import TILE, Outputs, Row, Slot
from paceline.core.sequence import Sequence
from paceline.core.stopping import StopRules
from paceline.decode.generate import run
from paceline.decode.judge import Judge
from paceline.decode.step import Machinery
from paceline.drafting.draft_model import DraftModel
from paceline.drafting.residents import Residents
from paceline.runners.table import TableRunner

LONG = [number % 3 for number in range(4 * TILE)]


class CountingRunner(TableRunner):
    """Counts the tokens it reads; and its room is not endless."""

    def __init__(self) -> None:
        super().__init__(vocab_size=4, order=2, seed=5)
        self.read, self.stored = 0, 1 << 30
        self.closed: list[Slot] = []

    def forward(self, rows: list[Row], *, last_only: bool = False) -> Outputs:
        self.read += sum(len(row.parents) for row in rows)
        return super().forward(rows, last_only=last_only)

    def close(self, slot: Slot) -> None:
        self.closed.append(slot)
        super().close(slot)

    def room(self) -> int:
        return self.stored


def filled(runner: TableRunner, ids: list[int]) -> Slot:
    slot = runner.open()
    runner.forward([Row.chain(slot, ids)], last_only=True)
    runner.keep(slot, list(range(len(ids))))
    return slot


def test_the_next_turn_takes_the_slot_over_and_another_text_gets_a_fork() -> None:
    runner = CountingRunner()
    residents = Residents(runner)
    slot = filled(runner, LONG)
    residents.keep(LONG, slot)
    other = residents.open([*LONG[: 2 * TILE], 3, 3, 3])
    assert other is not slot and other.length == 2 * TILE and len(residents) == 1
    again = residents.open([*LONG, 3, 3])
    assert again is slot and again.length == len(LONG) and len(residents) == 0


def test_the_last_token_of_a_text_is_always_read_anew() -> None:
    runner = CountingRunner()
    residents = Residents(runner)
    residents.keep(LONG, filled(runner, LONG))
    assert residents.open(LONG).length == len(LONG) - 1


def test_little_in_common_is_not_worth_it_and_the_oldest_goes() -> None:
    runner = CountingRunner()
    residents = Residents(runner, most=1)
    first, second = filled(runner, LONG), filled(runner, [3, *LONG])
    residents.keep(LONG, first)
    residents.keep([3, *LONG], second)
    assert len(residents) == 1 and runner.closed == [first]
    assert residents.open([*LONG, 1]).length == 0
    residents.keep(LONG[: TILE - 1], filled(runner, LONG[: TILE - 1]))
    assert len(residents) == 1 and len(runner.closed) == 2, "a short text is not kept"


def test_they_make_room() -> None:
    runner = CountingRunner()
    residents = Residents(runner)
    residents.keep(LONG, filled(runner, LONG))
    residents.make_room(1000)
    assert len(residents) == 1
    runner.stored = 10
    residents.make_room(1000)
    assert len(residents) == 0


def written(drafter: DraftModel, ids: list[int], *, keep: bool) -> list[int]:
    text = Sequence(ids, SamplingParams(), StopRules(12))
    for _ in run(
        [text], Machinery(TableRunner(vocab_size=4, order=2, seed=5), drafter, FixedBudget(3), Judge()), keep_slots=keep
    ):
        pass
    return text.ids


@pytest.mark.parametrize("keep", [True, False])
def test_a_draft_reads_a_conversation_once(keep: bool) -> None:
    runner = CountingRunner()
    drafter = DraftModel(runner, 4)
    first = written(drafter, LONG, keep=keep)
    runner.read = 0
    second = written(drafter, [*first, 1, 2], keep=keep)
    assert second == written(DraftModel(CountingRunner(), 4), [*first, 1, 2], keep=False)
    assert (runner.read < TILE + 20) == keep, f"{runner.read} tokens were read"
