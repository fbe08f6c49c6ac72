"""Prompts read in chunks, and the row that a step reads."""

from __future__ import annotations

import pytest
import torch

from paceline.core.draft_tree import DraftTree, chain, empty
from paceline.core.sequence import Sequence
from paceline.core.types import RowOutput, SequenceCache
from paceline.engines.local.prefill import join_chunks, num_unread, prefill_row, step_row
from paceline.kv.block_manager import BLOCK_SIZE
from tests.support.build import sequence


def started(length: int, cached: int = 0) -> Sequence:
    seq, cache = sequence(list(range(length)), 4), SequenceCache()
    cache.length = cached
    seq.start(cache)
    return seq


def test_all_but_the_last_token_is_to_be_read() -> None:
    assert num_unread(started(10)) == 9
    assert num_unread(started(10, cached=9)) == 0


@pytest.mark.parametrize(
    ("cached", "chunk", "end"),
    [
        (0, 8, 8),  # less than a block: as asked
        (0, 100, BLOCK_SIZE),  # cut at a block
        (BLOCK_SIZE, 100, 2 * BLOCK_SIZE),
        (10, 20, 30),  # no block ends inside: as asked
        (0, 1000, 299),  # all that is left
    ],
)
def test_chunks_end_at_blocks_or_at_the_end(cached: int, chunk: int, end: int) -> None:
    row = prefill_row(started(300, cached), chunk)
    assert row.tokens.tolist() == list(range(cached, end)) and row.is_chain


def test_a_step_reads_the_last_token_and_the_drafts_after_it() -> None:
    seq = started(5, cached=4)
    plain = step_row(seq, empty())
    assert (plain.ids().tolist(), plain.parents) == ([4], [-1])
    row = step_row(seq, chain([7, 8]))
    assert (row.ids().tolist(), row.parents) == ([4, 7, 8], [-1, 0, 1])
    tree = step_row(seq, DraftTree(torch.tensor([7, 8]), [-1, -1]))
    assert tree.parents == [-1, 0, 0]


def test_a_cache_that_lags_behind_its_sequence_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="every token of its sequence but the last"):
        step_row(started(5, cached=3), empty())


def test_chunks_join_as_if_the_prompt_had_been_read_at_once() -> None:
    first = RowOutput(torch.ones(1, 3), torch.ones(4, 2), torch.ones(4, 6))
    second = RowOutput(torch.zeros(1, 3), torch.zeros(2, 2), torch.zeros(2, 6))
    joined = join_chunks([first, second])
    assert joined is not None and torch.equal(joined.logits, second.logits)
    assert joined.hidden is not None and joined.hidden.tolist() == [[1, 1]] * 4 + [[0, 0]] * 2
    assert joined.features is not None and joined.features.shape == (6, 6)
    assert join_chunks([]) is None and join_chunks([first]) is first
    bare = join_chunks([RowOutput(torch.ones(1, 3))] * 2)
    assert bare is not None and bare.hidden is None and bare.features is None
