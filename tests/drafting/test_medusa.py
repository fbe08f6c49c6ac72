"""Medusa heads: the right head for the right place, trees of the likeliest combinations, exact outputs."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from paceline.core.draft_tree import empty, path_to
from paceline.core.types import RowOutput, StepResult, VerifyResult
from paceline.drafting.medusa import Medusa, likeliest_tree
from paceline.drafting.registry import build_drafter
from paceline.errors import OptionError, PairError
from paceline.heads.medusa import MedusaConfig, MedusaHeads
from paceline.runners.huggingface import HuggingFaceRunner
from paceline.runners.table import TableRunner
from tests.heads import checkpoints
from tests.support.drafter_exactness import (
    assert_unchanged,
    check_greedy,
    check_sampled,
    context_for,
    sequences,
    toy,
)


def toy_heads(heads: int = 3, reduced: bool = False) -> MedusaHeads:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        made = MedusaHeads(MedusaConfig(heads, 1, 4, 4, 3 if reduced else 4)).requires_grad_(False)
    if reduced:
        made.choose_vocabulary(torch.tensor([0, 2, 3]))
    return made


def circle() -> TableRunner:
    """A toy that counts: after token t comes t + 1, and its state tells which token it has just read."""
    target = TableRunner(vocab_size=5, order=1)
    target.table = torch.full((6, 5), -4.0)
    for token in range(5):
        target.table[token, (token + 1) % 5] = 4.0
    return target


def counting_heads() -> MedusaHeads:
    """Heads that know the circle: the state after t points at t + 1, and head h predicts the token h + 1 further on."""
    heads = MedusaHeads(MedusaConfig(3, 1, 5, 5, 5)).requires_grad_(False)
    for ahead, lm_head in enumerate(heads.lm_heads, start=1):
        lm_head.weight.copy_(torch.eye(5).roll(ahead, dims=0))
    return heads


@pytest.mark.parametrize("branches", [1, 3])
def test_an_oracle_is_always_right(branches: int) -> None:
    """Head h predicts the position h after the next; one position off and nothing would be accepted."""
    target = circle()
    drafter = Medusa(counting_heads(), target, branches=branches)
    result = assert_unchanged(target, drafter, [[1, 2, 3], [4, 0, 1], [2, 3]], 41, 3 if branches == 1 else 40)
    assert result.acceptance_by_position == [1.0] * 3
    assert result.steps == 3 * 11, "forty tokens in tens of four, and one more step for the last"


def test_trees_hold_the_likeliest_combinations() -> None:
    scores = [[math.log(p) for p in row] for row in ((0.5, 0.3, 0.1), (0.6, 0.2, 0.1), (0.4, 0.35, 0.2))]
    tokens = torch.tensor([[10, 11, 12], [20, 21, 22], [30, 31, 32]])
    every = {
        tuple(10 * (head + 1) + rank for head, rank in enumerate(ranks)): sum(
            scores[head][rank] for head, rank in enumerate(ranks)
        )
        for depth in (1, 2, 3)
        for ranks in itertools.product(range(3), repeat=depth)
    }
    best = sorted(every.values(), reverse=True)
    for limit in (1, 4, 9, 25, 39, 100):
        tree = likeliest_tree(scores, tokens, limit)
        output = tree.tokens.tolist()
        paths = {tuple(output[step] for step in path_to(tree.parents, node)) for node in range(len(tree))}
        assert len(paths) == len(tree) == min(limit, 39)
        assert sorted((every[path] for path in paths), reverse=True) == pytest.approx(best[: len(tree)])


@pytest.mark.parametrize("reduced", [False, True])
def test_greedy_outputs_are_unchanged(reduced: bool) -> None:
    check_greedy(Medusa(toy_heads(reduced=reduced), toy()))


@pytest.mark.slow
def test_sampled_outputs_are_exact() -> None:
    check_sampled(Medusa(toy_heads(reduced=True), toy(), branches=2))


def test_num_draft_tokens_and_ends_are_kept() -> None:
    drafter = Medusa(toy_heads(), toy(), nodes=5)
    seqs = sequences([[0, 1, 2], [2, 3], [1]], 10)
    for seq in seqs:
        rows = torch.randn(len(seq.ids) - 1, 4)
        drafter.begin(seq, RowOutput(rows, rows) if len(rows) else None)
    assert [len(tree) for tree in drafter.propose(seqs, [3, 0, 2])] == [3, 0, 0], "nothing is known of the third yet"
    assert len(drafter.propose(seqs, [40, 0, 0])[0]) == 5
    for seq in seqs:
        drafter.end(seq)
    assert not drafter._states


def test_heads_for_another_target_are_refused() -> None:
    with pytest.raises(PairError, match="states of 4 values; table has 7"):
        Medusa(toy_heads(), TableRunner(vocab_size=7))
    heads = MedusaHeads(MedusaConfig(1, 1, 4, 90, 2))
    heads.choose_vocabulary(torch.tensor([1, 80]))
    with pytest.raises(PairError, match="predict token 80"):
        Medusa(heads, toy())
    with pytest.raises(OptionError, match="branch"):
        Medusa(toy_heads(), toy(), branches=0)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["medusa", "medusa_vllm"])
def test_published_heads_draft(layout: str, tiny_model: object, tmp_path: Path) -> None:
    target = HuggingFaceRunner(tiny_model, "tiny")  # type: ignore[arg-type]
    drafter = build_drafter("medusa", context_for(target, checkpoints.write(tmp_path, layout)))
    result = assert_unchanged(target, drafter, [[5, 7, 9, 11], [250], [3, 3, 8, 3]], 20, 6)
    assert result.drafted > 0


def test_steps_without_states_leave_nothing_to_draft_from() -> None:
    drafter, (seq,) = Medusa(toy_heads(), toy()), sequences([[0, 1, 2]], 10)
    rows = torch.randn(2, 4)
    drafter.begin(seq, RowOutput(rows, rows))
    drafter.observe([seq], [StepResult(empty(), VerifyResult([], 1), RowOutput(rows), [1])])
    assert len(drafter.propose([seq], [3])[0]) == 0
