"""Acceptance along a text, and what tells two readings apart."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.lint.comparison import Acceptance, DraftedTokens, most_gained, own_ids, paired, probs_of


def accepted(expected: list[float]) -> Acceptance:
    return Acceptance(torch.zeros(len(expected), dtype=torch.int64), torch.tensor(expected), 1)


def test_a_chain_ends_at_its_first_wrong_token_and_drawn_ones_by_chance() -> None:
    drafts = DraftedTokens(torch.tensor([[1, 2, 3], [1, 9, 3]]), torch.tensor([[0.5, 0.5, 1.0], [1.0, 0.0, 1.0]]))
    measured = Acceptance.of(drafts, torch.tensor([[1, 2, 3], [1, 2, 3]]))
    assert measured.lengths.tolist() == [3, 1]
    assert measured.expected.tolist() == [0.5 + 0.25 + 0.25, 1.0]
    assert measured.first(1).tokens_per_step == 4 and measured.tokens_per_step == 3


def test_probabilities_of_tokens_a_head_cannot_predict_are_0() -> None:
    target_ids = torch.tensor([7, 2, 99, -4])  # the head's tokens; two of the map are no tokens of the target
    own = own_ids(torch.tensor([2, 3, 7]), target_ids, 10)
    assert own.tolist() == [1, -1, 0]
    logits = torch.tensor([[0.0, math.log(3.0), -math.inf, -math.inf]]).expand(3, -1)
    assert probs_of(logits, own).tolist() == pytest.approx([0.75, 0.0, 0.25])


def test_small_differences_everywhere_tell_more_than_their_size() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.rand(160, generator=generator)
    better = (base + 0.002 + 0.001 * torch.rand(160, generator=generator)).tolist()
    assert paired(accepted(better), accepted(base.tolist())) > 5
    assert most_gained(accepted(better), accepted(base.tolist()), 4.0) < 0.004
    assert paired(accepted(better), accepted(better)) == 0


def test_accepted_tokens_tell_where_probabilities_do_not() -> None:
    """A head whose probabilities are all alike, and whose likeliest tokens are right in every second place."""
    right = Acceptance(torch.arange(160) % 2, torch.full((160,), 0.1), 1)
    wrong = Acceptance(torch.zeros(160, dtype=torch.int64), torch.full((160,), 0.1), 1)
    assert paired(right, wrong) == math.inf and paired(wrong, right) == 0


def test_a_few_places_bound_nothing() -> None:
    assert most_gained(accepted([0.1] * 48), accepted([0.1] * 48), 4.0) == math.inf
