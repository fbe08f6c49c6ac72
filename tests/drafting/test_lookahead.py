"""The shape of the window, what it learns, and that it never changes an output."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.core.draft_length import FixedDraftLength
from paceline.core.draft_tree import path_to
from paceline.core.sequence import Sequence
from paceline.drafting.lookahead import Lookahead, NgramPool
from paceline.errors import OptionError
from paceline.runners.huggingface import HuggingFaceRunner
from paceline.runners.table import TableRunner
from tests.support.build import sequence, toy_engine
from tests.support.drafter_exactness import assert_unchanged, check_greedy, check_sampled, engine_of, generated, steps


def sequence_of(ids: list[int], room: int = 200) -> Sequence:
    return sequence(ids, room)


def test_the_window_is_a_chain_of_heads_from_which_columns_hang() -> None:
    drafter, seq = Lookahead(columns=3, run=4), sequence_of([5, 6, 7])
    tree = drafter.propose([seq], [2])[0]
    assert tree.num_draft_tokens == 0 and tree.probes == drafter.probes == 8, (
        "2 below the last token of the sequence, then 3 in each further column"
    )
    assert tree.parents == [-1, 0, -1, 2, 3, 2, 5, 6]
    columns = drafter._windows[seq.seq_id].columns
    assert columns[0][0] == 7
    assert tree.tokens.tolist() == columns[0][1:] + columns[1] + columns[2]
    assert columns[1][0] == columns[0][1], "a column starts with the second token of the one before"


def test_draft_tokens_come_first_and_the_window_does_not_count_as_them() -> None:
    drafter, seq = Lookahead(columns=3, run=3), sequence_of([1, 2, 3, 1, 2, 4, 1])
    tree = drafter.propose([seq], [3])[0]
    assert tree.num_draft_tokens == 3 and tree.tokens.tolist()[:3] == [2, 4, 3]
    assert tree.probes == 3 * 2 - 1
    assert all(parent == -1 or parent >= tree.num_draft_tokens for parent in tree.parents[tree.num_draft_tokens :])


def test_the_targets_token_below_a_column_is_learnt() -> None:
    """Every added token is the target's argmax after exactly the tokens of that column's path: a wrong parent or row
    would break this."""
    target, drafter, seq = TableRunner(12, order=2, seed=3), Lookahead(columns=4, run=4), sequence_of([1, 2, 3])
    learnt: list[list[int]] = []
    for [result] in steps([seq], target, drafter, 4):
        tree, ahead = result.tree, drafter._windows.get(seq.seq_id)
        if ahead is None or not tree.probes:
            continue
        before = seq.ids[: len(seq.ids) - len(result.emitted)]
        tokens = tree.tokens.tolist()
        ends = [node for node in range(tree.num_draft_tokens, len(tree)) if node not in tree.parents]
        for end in ends[len(result.emitted) - 1 :]:
            path = before + [tokens[node] for node in path_to(tree.parents, end)]
            learnt.append([*path[-2:], int(target.table[target._context(path)].argmax())])
        assert [column[-1] for column in ahead.columns] == [run_[-1] for run_ in learnt[-len(ahead.columns) :]]
    assert len(learnt) > 50


@pytest.mark.slow
def test_the_window_finds_what_the_sequence_does_not_hold_yet() -> None:
    """With a thousand tokens a sequence rarely repeats itself, so most n-grams come from the window."""
    taus = {True: 0.0, False: 0.0}
    for window in taus:
        for seed in range(8):
            target, seq = TableRunner(1000, order=1, seed=seed), sequence_of([1, 2, 3, 4], 60)
            drafter = Lookahead(columns=8, run=4, window=window)
            generated([seq], engine_of(target, drafter, 6))
            taus[window] += seq.stats.tokens_per_step / 8
    assert taus[True] > taus[False] + 0.15


def test_a_pool_keeps_the_latest_ngrams_and_each_once() -> None:
    pool = NgramPool(2)
    for ngram in ([1, 2, 3], [1, 4, 5], [1, 2, 3], [1, 6, 7]):
        pool.add(ngram)
    assert list(pool.after(1)) == [(6, 7), (2, 3)]
    assert list(pool.after(9)) == []


def test_near_the_end_there_is_no_window() -> None:
    drafter, seq = Lookahead(columns=6, run=4), sequence_of([1, 2, 3], room=9)
    assert drafter.propose([seq], [3])[0].probes == 0


class EveryThirdPlain(FixedDraftLength):
    """No draft tokens in the second step of every three."""

    def __init__(self) -> None:
        super().__init__(3)
        self.step = -1

    def plan(self, seqs: list[Sequence]) -> list[int]:
        self.step += 1
        return [0] * len(seqs) if self.step % 3 == 2 else super().plan(seqs)


def test_steps_without_the_window_advance_it() -> None:
    """num_draft_tokens 0 in between: the columns keep their positions, so the first ones fall off."""
    drafter, seq = Lookahead(columns=5, run=3), sequence_of([1, 2, 3])
    engine = toy_engine(TableRunner(12, order=2, seed=3), drafter, EveryThirdPlain(), prefix_cache_tokens=0)
    engine.add(seq)
    for limit in (5, 5, 4):
        engine.step()
        assert len(drafter._windows[seq.seq_id].columns) <= limit
    while engine.has_work:
        engine.step()
    assert seq.finished


@pytest.mark.parametrize("wrong", [{"columns": 0}, {"run": 2}, {"kept": 0}])
def test_impossible_options_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(OptionError):
        Lookahead(**wrong)


def test_greedy_outputs_are_unchanged() -> None:
    check_greedy(Lookahead(columns=4, run=4))


@pytest.mark.slow
def test_sampled_outputs_have_the_right_distribution() -> None:
    check_sampled(Lookahead(columns=2, run=3))


@pytest.mark.slow
def test_a_transformers_model_reads_window_and_draft_tokens(tiny_model: Any) -> None:
    target = HuggingFaceRunner(tiny_model, "tiny")
    assert assert_unchanged(target, Lookahead(), [[5, 7, 9, 5, 7, 9, 5, 7]], 80, 6).accepted > 0
