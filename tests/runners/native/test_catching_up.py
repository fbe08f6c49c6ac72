"""What a draft model lacks of sequences: prompts by themselves, a few tokens together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest

from paceline.core.types import DraftInput
from paceline.runners.native.catching_up import LEAD_TOKENS, CatchUpPass, QuickReading, catch_up_passes


@dataclass(eq=False)
class Cache:
    """How much of a sequence is read."""

    length: int = 0


def drafts(*lacking: int, length: int = 50) -> list[DraftInput]:
    """Sequences of so many tokens, of which a draft model lacks these numbers."""
    caches = [Cache(length - LEAD_TOKENS - count) for count in lacking]
    return [DraftInput(cast(Any, cache), list(range(length))) for cache in caches]


def read(inputs: list[DraftInput], quick: QuickReading) -> list[CatchUpPass]:
    """Every pass, read as a runner does: the caches grow before the next one."""
    passes = []
    for part in catch_up_passes(inputs, quick):
        for row in part.rows:
            start = row.seq_cache.length
            assert row.ids().tolist() == list(range(start, start + len(row.parents)))
            row.seq_cache.length += len(row.parents)
        passes.append(part)
    return passes


def widths(part: CatchUpPass) -> list[int]:
    return [len(row.parents) for row in part.rows]


def test_prompts_are_read_apart_from_sequences_that_lack_a_few_tokens() -> None:
    passes = read(drafts(40, 1, 7, 0, 33), QuickReading(nodes=4, most=16))
    assert [(part.is_quick, widths(part)) for part in passes] == [(False, [40, 33]), (True, [1, 4]), (True, [3])]


@pytest.mark.parametrize("quick", [QuickReading(), QuickReading(2, 2), QuickReading(4, 16), QuickReading(8, 32)])
@pytest.mark.parametrize("lacking", [(0,), (1,), (48,), (1, 2, 3), (16, 17), (8, 48, 0, 5, 32, 33)])
def test_afterwards_no_sequence_lacks_anything(quick: QuickReading, lacking: tuple[int, ...]) -> None:
    inputs = drafts(*lacking)
    for part in read(inputs, quick):
        assert not part.is_quick or max(widths(part)) <= quick.nodes
    assert all(draft.seq_cache.length == len(draft.ids) - LEAD_TOKENS for draft in inputs)


def test_without_narrow_passes_all_are_read_together() -> None:
    assert [widths(part) for part in read(drafts(1, 40, 3), QuickReading())] == [[1, 40, 3]]


@pytest.mark.parametrize(
    ("num_seqs", "rows", "expected"),
    [
        (1, None, QuickReading(2, 2)),  # more would capture graphs that no other pass needs
        (1, 32, QuickReading(8, 32)),
        (5, 32, QuickReading(4, 16)),  # one of the sizes that graphs are made ready for
        (8, 32, QuickReading(4, 16)),
        (16, 32, QuickReading(2, 8)),
        (24, 32, QuickReading(2, 2)),  # too many for one kernel
        (1000, 32, QuickReading(2, 2)),
    ],
)
def test_as_much_as_one_kernel_reads_of_each_sequence(num_seqs: int, rows: int | None, expected: QuickReading) -> None:
    assert QuickReading.of(num_seqs, rows) == expected
