"""The proposer as vLLM calls it: rows of a batch, without names, that move when a sequence before them ends."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from paceline.engines.vllm.proposer import Proposer

K, LONGEST = 4, 64
CYCLE = [5, 6, 7, 8]


def proposer(adaptive: bool = False) -> Proposer:
    return Proposer(
        SimpleNamespace(
            additional_config={"paceline": {"adaptive": adaptive, "options": {}}},
            speculative_config=SimpleNamespace(num_speculative_tokens=K),
            model_config=SimpleNamespace(max_model_len=LONGEST),
        )
    )


class Batch:
    """The batch of a vLLM worker: tokens by row."""

    def __init__(self, drafter: Proposer, rows: list[list[int]]) -> None:
        self._drafter, self.rows = drafter, rows

    def step(self, sampled: list[list[int]]) -> list[list[int]]:
        """Append what each row sampled, and ask for the next draft tokens."""
        for row, tokens in zip(self.rows, sampled):
            row += tokens
        table = np.zeros((8, LONGEST), dtype=np.int32)
        for index, row in enumerate(self.rows):
            table[index, : len(row)] = row
        lengths = np.array([len(row) for row in self.rows], dtype=np.int32)
        return self._drafter.propose(sampled, lengths, table, slot_mappings=None)


def test_what_repeats_is_drafted_for_every_row_and_nothing_for_a_prompt_being_read() -> None:
    batch = Batch(proposer(), [CYCLE * 3, [1, 2, 3], [9, 9]])
    drafts = batch.step([[5], [4], []])
    assert drafts[0] == [6, 7, 8, 5][: len(drafts[0])] and drafts[0]
    assert drafts[1:] == [[], []]


def test_a_sequence_that_moves_to_another_row_is_known_by_its_tokens() -> None:
    drafter = proposer()
    batch = Batch(drafter, [[1, 2, 3], CYCLE * 3])
    batch.step([[4], [5]])
    known = drafter._pass.rows[1].seq
    moved = Batch(drafter, [batch.rows[1]])
    drafts = moved.step([[6, 7]])
    assert drafter._pass.rows[0].seq is known and known.ids == [*CYCLE * 3, 5, 6, 7]
    assert drafts[0][:1] == [8]


def test_a_sequence_that_is_gone_is_forgotten() -> None:
    drafter = proposer()
    Batch(drafter, [CYCLE * 3]).step([[5]])
    other = Batch(drafter, [[30, 31, 32, 33]])
    assert other.step([[34]]) == [[]]
    assert len(drafter._pass.rows) == 1 and drafter._pass.rows[0].seq.ids == [30, 31, 32, 33, 34]


def test_no_more_is_drafted_than_fits_the_context() -> None:
    batch = Batch(proposer(), [(CYCLE * 16)[: LONGEST - 3]])
    assert len(batch.step([[CYCLE[(LONGEST - 3) % 4]]])[0]) <= 1


@pytest.mark.parametrize("accepts", [True, False], ids=["all accepted", "none accepted"])
def test_the_policy_drafts_less_where_drafts_are_rejected(accepts: bool) -> None:
    """The same repeating sequence twice; once the target agrees, once it always goes another way."""
    drafter = proposer(adaptive=True)
    batch = Batch(drafter, [CYCLE * 2])
    drafted, drafts = 0, batch.step([[5]])
    for turn in range(10):
        sampled = [*drafts[0], _next(batch.rows[0], drafts[0])] if accepts else [40 + turn % 2]
        if len(batch.rows[0]) + len(sampled) >= LONGEST - 1:
            break
        drafts = batch.step([sampled])
        drafted += len(drafts[0])
    rates = drafter._policy._rates_of("").rates(1)  # type: ignore[attr-defined]
    assert (rates[0] > 0.55) == accepts and (drafted > 0 or not accepts)


def _next(row: list[int], draft: list[int]) -> int:
    return CYCLE[(CYCLE.index((row + draft)[-1]) + 1) % 4]
