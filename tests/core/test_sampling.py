"""Logits -> the distribution that is really sampled."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from paceline.core.sampling import SamplingParams, TokenHistory, distribution, draw
from paceline.errors import OptionError

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0])


def sampled(**settings: Any) -> list[float]:
    return distribution(LOGITS, SamplingParams(temperature=settings.pop("temperature", 1.0), **settings)).tolist()


def test_greedy_is_a_one_hot_row() -> None:
    assert distribution(LOGITS, SamplingParams()).tolist() == [1.0, 0.0, 0.0, 0.0]


def test_temperature_divides_the_logits() -> None:
    assert sampled(temperature=2.0) == pytest.approx(torch.softmax(LOGITS / 2, -1).tolist())


def test_top_k_keeps_k() -> None:
    e, one = math.e, 1.0
    assert sampled(top_k=2) == pytest.approx([e / (e + one), one / (e + one), 0, 0])
    assert sampled(top_k=99) == pytest.approx(sampled())


def test_top_p_keeps_the_smallest_set_that_holds_p() -> None:
    whole = sampled()
    assert [p > 0 for p in sampled(top_p=whole[0] - 0.01)] == [True, False, False, False]
    assert [p > 0 for p in sampled(top_p=whole[0] + 0.01)] == [True, True, False, False]


def test_min_p_is_relative_to_the_best() -> None:
    assert [p > 0 for p in sampled(min_p=math.exp(-2) - 0.01)] == [True, True, True, False]
    assert [p > 0 for p in sampled(min_p=1.0)] == [True, False, False, False]


def test_cuts_are_the_same_as_transformers() -> None:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(0)) * 3
    scores = logits
    for warp in (TemperatureLogitsWarper(0.7), TopKLogitsWarper(30), TopPLogitsWarper(0.9), MinPLogitsWarper(0.02)):
        scores = warp(torch.zeros(20, 1, dtype=torch.int64), scores)
    ours = distribution(logits, SamplingParams(0.7, 30, 0.9, 0.02))
    assert torch.allclose(ours, torch.softmax(scores, -1), atol=1e-6)


def test_repetition_penalty_is_the_same_as_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(1))
    before = torch.tensor([[3, 7, 7, 9]])
    theirs = torch.softmax(RepetitionPenaltyLogitsProcessor(1.4)(before, logits.clone()), -1)
    ours = distribution(logits, SamplingParams(1.0, repetition_penalty=1.4), [TokenHistory([3, 7], [7, 9])])
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_presence_and_frequency_count_only_what_was_written() -> None:
    how = SamplingParams(1.0, presence_penalty=0.5, frequency_penalty=0.25)
    ours = distribution(LOGITS[None], how, [TokenHistory([0, 0], [1, 1, 2])])
    expected = torch.softmax(LOGITS - torch.tensor([0.0, 0.5 + 0.5, 0.5 + 0.25, 0.0]), -1)
    assert torch.allclose(ours[0], expected)


def test_penalties_follow_each_rows_own_path() -> None:
    how = SamplingParams(0.0, presence_penalty=5.0)
    rows = distribution(
        LOGITS.expand(3, -1), how, [TokenHistory([9], []), TokenHistory([9], [0]), TokenHistory([9], [0, 1])]
    )
    assert rows.argmax(-1).tolist() == [0, 1, 2]


def test_bias_and_grammar() -> None:
    assert distribution(LOGITS, SamplingParams(logit_bias={3: 100.0})).argmax() == 3
    allowed = torch.tensor([[False, False, True, True]])
    found = distribution(LOGITS[None], SamplingParams(1.0), None, allowed)[0]
    assert found[:2].tolist() == [0, 0] and float(found.sum()) == pytest.approx(1)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"temperature": "warm"},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"top_k": 2.5},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(settings))):
        SamplingParams(**settings)


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(OptionError, match="99"):
        distribution(LOGITS, SamplingParams(logit_bias={99: 1.0}))


def test_draw_inverts_the_cumulative_distribution() -> None:
    row = torch.tensor([0.25, 0.0, 0.5, 0.25])
    numbers = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53], dtype=torch.float64)
    assert draw(row.expand(6, -1), numbers).tolist() == [0, 0, 2, 2, 3, 3]


def test_draw_never_returns_a_token_without_weight() -> None:
    top = torch.tensor(1 - 2**-53, dtype=torch.float64)
    for seed in range(200):
        row = torch.rand(1000, generator=torch.Generator().manual_seed(seed))
        row[500:] = 0.0
        assert float(row[draw(row, top)]) > 0
    first = torch.tensor([0.0, 0.0, 1.0])
    assert int(draw(first, torch.tensor(0.0))) == 2


@pytest.mark.parametrize(
    "more", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"presence_penalty": 0.5}, {"logit_bias": {3: 1.0}}]
)
def test_only_a_temperature_is_drawn_plainly(more: dict[str, Any]) -> None:
    assert SamplingParams(temperature=0.7).plainly_drawn
    assert not SamplingParams().plainly_drawn
    assert not SamplingParams(temperature=0.7, **more).plainly_drawn
