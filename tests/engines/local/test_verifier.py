"""Verification of a mixed batch: every sequence by its own rule and settings, each draft token along its own path."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.core.draft_tree import DraftTree, chain, empty, merge
from paceline.core.sampling import SamplingParams, distribution
from paceline.core.types import ModelOutput, RowOutput, VerifyResult
from paceline.core.verify import RULES
from paceline.engines.local.verifier import Verifier, logprobs_of, target_rows
from tests.support.build import sequence

VOCAB = 7


class OnlyAfter:
    """A grammar that allows one token after each path, and notes the paths."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.paths: list[list[int]] = []

    def allowed(self, path: list[int]) -> torch.Tensor:
        self.paths.append(path)
        mask = torch.zeros(VOCAB, dtype=torch.bool)
        mask[self.tokens[len(path)]] = True
        return mask

    def advance(self, tokens: list[int]) -> None:
        self.tokens = self.tokens[len(tokens) :]


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def test_a_mixed_batch_is_verified_as_each_sequence_alone() -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"sampling": SamplingParams(0.8, seed=1)},
        {"sampling": SamplingParams(0.8, seed=2)},
        {"sampling": SamplingParams(0.8, top_p=0.9, seed=3), "rule": "block"},
        {"sampling": SamplingParams(1.0, seed=4), "rule": "coupled"},
        {"sampling": SamplingParams(presence_penalty=2.0)},
        {"rule": "lossy-typical"},
        {"sampling": SamplingParams(0.8, seed=5), "rule": "coupled"},
    ]
    trees = [chain([index % VOCAB, 3]) if index != 2 else empty() for index in range(len(kinds))]
    logits = [random_logits(len(tree) + 1, seed) for seed, tree in enumerate(trees)]
    batch = Verifier().verify(
        [sequence([1, 2], 9, **kind) for kind in kinds], trees, ModelOutput.of([RowOutput(row) for row in logits])
    )
    for index, kind in enumerate(kinds):
        output = ModelOutput.of([RowOutput(logits[index])])
        [alone] = Verifier().verify([sequence([1, 2], 9, **kind)], [trees[index]], output)
        assert batch[index] == alone, kind


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("drafted", [0, 1])
def test_a_greedy_sequence_is_the_argmax_under_every_rule(rule: str, drafted: int) -> None:
    logits = torch.tensor([[2.0, 1.9, 0, 0, 0, 0, 0], [0, 0, 1.0, 0, 0, 0, 0]])
    seq = sequence([1], 9, rule=rule)
    [result] = Verifier().verify([seq], [chain([drafted])], ModelOutput(logits, [2]))
    assert result == (VerifyResult([0], 2, [0]) if drafted == 0 else VerifyResult([], 0, []))


def test_penalties_follow_each_draft_tokens_path() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0, 0, 0, 0]] * 3)
    seq = sequence([1], 9, SamplingParams(presence_penalty=5.0))
    rows = target_rows([seq], [chain([0, 1])], [logits])
    assert rows.argmax(-1).tolist() == [0, 1, 2]


def test_a_grammar_is_walked_along_every_path_of_a_tree() -> None:
    grammar = OnlyAfter([4, 5, 6])
    tree = merge([[4, 5], [2]], 3)
    seq = sequence([1], 9, constraint=grammar)
    [result] = Verifier().verify([seq], [tree], ModelOutput(random_logits(4), [4]))
    assert result == VerifyResult([0, 1], 6, [4, 5])
    assert sorted(map(tuple, grammar.paths)) == [(), (2,), (4,), (4, 5)]


def test_probes_are_read_and_not_verified() -> None:
    tree = DraftTree(torch.tensor([3, 5]), [-1, -1], None, probes=1)
    logits = torch.zeros(3, VOCAB)
    logits[0, 5] = logits[1, 1] = 9.0
    [result] = Verifier().verify([sequence([1], 9)], [tree], ModelOutput(logits, [3]))
    assert result == VerifyResult([], 5, []), "token 5 was drafted only as a probe"


def test_an_argmax_that_the_pass_computed_is_used() -> None:
    output = ModelOutput(torch.zeros(2, VOCAB), [2], best=torch.tensor([4, 6]))
    [result] = Verifier().verify([sequence([1], 9)], [chain([4])], output)
    assert result == VerifyResult([0], 6, [4])


@pytest.mark.parametrize("top", [0, 2])
def test_logprobs_are_of_the_row_that_chose_the_token_whatever_the_temperature(top: int) -> None:
    logits = random_logits(3)
    seq = sequence([1], 9, SamplingParams(temperature=0.1, seed=0))
    logprobs = logprobs_of(seq, RowOutput(logits), VerifyResult([0], 4, [2]), top)
    rows = torch.log_softmax(logits, dim=-1)
    assert [logprob.token for logprob in logprobs] == [2, 4]
    assert [logprob.logprob for logprob in logprobs] == pytest.approx([float(rows[0, 2]), float(rows[1, 4])])
    assert [len(logprob.top) for logprob in logprobs] == [top, top]
    if top:
        assert logprobs[0].top[0][0] == int(rows[0].argmax())


def test_logprobs_count_biases_and_grammars() -> None:
    seq = sequence([1], 9, SamplingParams(logit_bias={3: 100.0}))
    [logprob] = logprobs_of(seq, RowOutput(random_logits(1)), VerifyResult([], 3), 0)
    assert logprob.logprob == pytest.approx(0.0, abs=1e-4)
    constrained = sequence([1], 9, constraint=OnlyAfter([2]))
    [logprob] = logprobs_of(constrained, RowOutput(random_logits(1)), VerifyResult([], 2), 0)
    assert logprob.logprob == pytest.approx(0.0, abs=1e-6)


def test_sequences_with_the_same_settings_share_one_distribution() -> None:
    seqs = [sequence([1], 9, SamplingParams(0.5, seed=seed)) for seed in range(2)]
    logits = [random_logits(2), random_logits(1, 1)]
    rows = target_rows(seqs, [chain([3]), empty()], logits)
    assert torch.equal(rows, distribution(torch.cat(logits), SamplingParams(0.5)))
