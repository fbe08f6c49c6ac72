"""The window's shape, what it learns, and that it never changes a text."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline import SpeculativeDecoder
from paceline.core.draft_length import FixedDraftLength
from paceline.core.draft_tree import path_to
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.core.stopping import StopRules
from paceline.drafting.lookahead import Lookahead, Pool
from paceline.engines.local.generate import run
from paceline.engines.local.step import EngineParts
from paceline.engines.local.verifier import Verifier
from paceline.errors import OptionError
from paceline.runners.table import TableRunner
from tests.support.drafter_exactness import check_greedy, check_sampled


def text_of(ids: list[int], room: int = 200) -> Sequence:
    return Sequence(ids, SamplingParams(), StopRules(room))


def test_the_window_is_a_chain_of_heads_from_which_columns_hang() -> None:
    drafter, seq = Lookahead(columns=3, run=4), text_of([5, 6, 7])
    tree = drafter.propose([seq], [2])[0]
    assert tree.num_draft_tokens == 0 and tree.probes == drafter.probes == 8, (
        "2 below the text's last token, then 3 in each further column"
    )
    assert tree.parents == [-1, 0, -1, 2, 3, 2, 5, 6]
    columns = drafter._texts[seq.seq_id].columns
    assert columns[0][0] == 7
    assert tree.tokens.tolist() == columns[0][1:] + columns[1] + columns[2]
    assert columns[1][0] == columns[0][1], "a head stands where the column before it has its second token"


def test_guesses_come_first_and_count_against_the_budget() -> None:
    drafter, seq = Lookahead(columns=3, run=3), text_of([1, 2, 3, 1, 2, 4, 1])
    tree = drafter.propose([seq], [3])[0]
    assert tree.num_draft_tokens == 3 and tree.tokens.tolist()[:3] == [2, 4, 3]
    assert tree.probes == 3 * 2 - 1
    assert all(parent == -1 or parent >= tree.num_draft_tokens for parent in tree.parents[tree.num_draft_tokens :])


def test_what_the_target_answers_below_a_column_is_learnt() -> None:
    """Every answer must be the target's word after exactly the tokens of that column's path: a wrong parent or row
    would break this."""
    target, drafter, seq = TableRunner(12, order=2, seed=3), Lookahead(columns=4, run=4), text_of([1, 2, 3])
    parts = EngineParts(target, drafter, FixedDraftLength(4), Verifier())
    learnt: list[list[int]] = []
    for progress in run([seq], parts):
        tree, ahead = progress.round.tree, drafter._texts.get(seq.seq_id)
        if ahead is None or not tree.probes:
            continue
        before = seq.ids[: len(seq.ids) - len(progress.round.emitted)]
        tokens = tree.tokens.tolist()
        ends = [node for node in range(tree.num_draft_tokens, len(tree)) if node not in tree.parents]
        for end in ends[len(progress.round.emitted) - 1 :]:
            path = before + [tokens[node] for node in path_to(tree.parents, end)]
            learnt.append([*path[-2:], int(target.table[target._context(path)].argmax())])
        assert [column[-1] for column in ahead.columns] == [run_[-1] for run_ in learnt[-len(ahead.columns) :]]
    assert len(learnt) > 50


def test_the_window_finds_what_the_text_has_not_said_yet() -> None:
    """A thousand tokens: the text seldom comes back to what it said, so most of what is found was found ahead of it."""
    taus = {True: 0.0, False: 0.0}
    for window in taus:
        for seed in range(8):
            target, seq = TableRunner(1000, order=1, seed=seed), text_of([1, 2, 3, 4], 60)
            drafter = Lookahead(columns=8, run=4, window=window)
            for _ in run([seq], EngineParts(target, drafter, FixedDraftLength(6), Verifier())):
                pass
            taus[window] += seq.stats.tokens_per_step / 8
    assert taus[True] > taus[False] + 0.15


def test_a_pool_keeps_the_latest_runs_and_each_once() -> None:
    pool = Pool(kept=2)
    for run_ in ([1, 2, 3], [1, 4, 5], [1, 2, 3], [1, 6, 7]):
        pool.add(run_)
    assert list(pool.after(1)) == [(6, 7), (2, 3)]
    assert list(pool.after(9)) == []


def test_near_the_end_there_is_no_window() -> None:
    drafter, seq = Lookahead(columns=6, run=4), text_of([1, 2, 3], room=9)
    assert drafter.propose([seq], [3])[0].probes == 0


def test_rounds_without_the_window_move_it_on() -> None:
    """A budget of 0 in between: the columns stay where they were in the text, so the first ones fall off."""
    target, drafter, seq = TableRunner(12, order=2, seed=3), Lookahead(columns=5, run=3), text_of([1, 2, 3])
    for seq_id, _ in enumerate(run([seq], EngineParts(target, drafter, FixedDraftLength(3), Verifier()))):
        seq.num_draft_tokens = 0 if seq_id % 3 == 1 else 3
        if seq_id == 1:
            assert len(drafter._texts[seq.seq_id].columns) <= 5
        if seq_id == 2:
            assert len(drafter._texts[seq.seq_id].columns) <= 4
    assert seq.finished


@pytest.mark.parametrize("wrong", [{"columns": 0}, {"run": 2}, {"kept": 0}])
def test_impossible_options_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(OptionError):
        Lookahead(**wrong)


def test_greedy_texts_are_unchanged() -> None:
    check_greedy(Lookahead(columns=4, run=4))


def test_sampled_texts_have_the_right_distribution() -> None:
    check_sampled(Lookahead(columns=2, run=3))


def test_a_transformers_model_reads_window_and_guesses(tiny_folder: Path) -> None:
    prompt = "to be or not to be, to be or not, to be or"
    output = [
        SpeculativeDecoder(str(tiny_folder), method=method, num_draft_tokens=6).generate(prompt, max_new_tokens=80)
        for method in ("none", "lookahead")
    ]
    assert output[0].token_ids == output[1].token_ids
    assert output[1].stats.accepted > 0
