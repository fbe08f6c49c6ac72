"""Logits -> the distribution that is really sampled."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.rng import SequenceRng, keyed_exponentials
from paceline.core.sampling import (
    BLOCK_TOKENS,
    LARGEST_NUMBER,
    LEAST_SCALE,
    SamplingParams,
    TokenHistory,
    distribution,
    draw,
    draw_keyed,
)
from paceline.errors import OptionError
from tests.support import chi2

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0])
DRAWS = 6_000
FALSE_ALARM = 1e-6  # the probability that correct code fails one statistical test of this file


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


@pytest.mark.parametrize("name", ["temperature", "presence_penalty", "frequency_penalty", "repetition_penalty", "bias"])
@pytest.mark.parametrize("value", [1e39, 10**400, float("inf"), float("nan")])
def test_numbers_that_float32_does_not_hold_are_refused(name: str, value: float) -> None:
    with pytest.raises(OptionError, match="number"):
        SamplingParams(**({"logit_bias": {1: value}} if name == "bias" else {name: value}))


@pytest.mark.parametrize("settings", [{"temperature": 1e-39}, {"temperature": 1.0, "top_p": 1e-46}])
def test_a_setting_that_vanishes_in_float32_leaves_the_likeliest_token(settings: dict[str, float]) -> None:
    assert distribution(torch.tensor([1.0, 7.0, 6.9]), SamplingParams(**settings)).tolist() == [0.0, 1.0, 0.0]


def test_a_row_has_no_probability_that_is_not_a_number_whatever_settings_come_together() -> None:
    """Of the smallest temperature and the largest numbers."""
    least, most = 1 / LARGEST_NUMBER, LARGEST_NUMBER
    for bias, penalty, repetition in itertools.product((-most, most), (-most, most), (least, most)):
        sampling = SamplingParams(
            temperature=LEAST_SCALE,
            presence_penalty=penalty,
            frequency_penalty=penalty,
            repetition_penalty=repetition,
            logit_bias={1: bias},
        )
        probs = distribution(torch.tensor([[-50.0, 60.0, 5.0]]), sampling, [TokenHistory([0, 1], [2, 1, 1])])
        assert bool(probs.isfinite().all()) and float(probs.sum()) == 1.0


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


# --- keyed draws ------------------------------------------------------------------------------------------------------


def row_of(vocab_size: int, seed: int = 1) -> Tensor:
    """A decided distribution; every third token has no weight."""
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * 2
    logits[::3] = -torch.inf
    return torch.softmax(logits, dim=-1)


def chi_squared_passes(tokens: Tensor, row: Tensor) -> bool:
    """Whether tokens are distributed as the row: chi², tokens expected fewer than five times are one cell."""
    expected = row.double() * tokens.numel()
    observed = torch.bincount(tokens, minlength=row.numel()).double()
    common = expected >= 5
    cells = torch.cat([expected[common], expected[~common].sum()[None]])
    counts = torch.cat([observed[common], observed[~common].sum()[None]])
    kept = cells > 0
    statistic = float(((counts - cells)[kept] ** 2 / cells[kept]).sum())
    return statistic < chi2.isf(FALSE_ALARM, int(kept.sum()) - 1)


def race_without_logarithm(probs: Tensor, uniform: Tensor) -> Tensor:
    """Wrong: uniform instead of exponential noise, the largest p·u."""
    noise = torch.exp(-keyed_exponentials(uniform[..., None], torch.arange(probs.shape[-1])))
    return (probs * noise).argmax(dim=-1)


def noise_used_twice(probs: Tensor, uniform: Tensor) -> Tensor:
    """Wrong: the race of the blocks has the noise of the first tokens."""
    blocks = torch.nn.functional.pad(probs, (0, -probs.shape[-1] % BLOCK_TOKENS)).unflatten(-1, (-1, BLOCK_TOKENS))
    weights = blocks.sum(dim=-1)
    block = (keyed_exponentials(uniform[..., None], torch.arange(weights.shape[-1])) / weights).argmin(dim=-1)
    inside = blocks.take_along_dim(block[..., None, None], dim=-2).squeeze(-2)
    tokens = block[..., None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)
    return block * BLOCK_TOKENS + (keyed_exponentials(uniform[..., None], tokens) / inside).argmin(dim=-1)


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [5, BLOCK_TOKENS, 3 * BLOCK_TOKENS - 40])
def test_a_keyed_draw_has_the_distribution_of_its_row(vocab_size: int) -> None:
    row, numbers = row_of(vocab_size), SequenceRng(4).at_positions(0, DRAWS)
    assert chi_squared_passes(draw_keyed(row.expand(len(numbers), -1), numbers), row)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [race_without_logarithm, noise_used_twice])
def test_a_wrong_keyed_draw_is_caught(wrong: Any) -> None:
    row, numbers = row_of(3 * BLOCK_TOKENS - 40), SequenceRng(4).at_positions(0, DRAWS)
    row[1:4] += 0.05  # tokens that share their noise with a block
    row = row / row.sum()
    assert chi_squared_passes(draw_keyed(row.expand(len(numbers), -1), numbers), row)
    assert not chi_squared_passes(wrong(row.expand(len(numbers), -1), numbers), row)


def test_a_keyed_draw_never_returns_a_token_without_weight() -> None:
    row, numbers = row_of(1000), SequenceRng(5).at_positions(0, 2000)
    assert bool((row[draw_keyed(row.expand(len(numbers), -1), numbers)] > 0).all())
    single = torch.zeros(1000)
    single[997] = 0.3
    assert draw_keyed(single.expand(50, -1), numbers[:50]).tolist() == [997] * 50


def test_a_keyed_draw_does_not_depend_on_the_rows_beside_it() -> None:
    rows, numbers = torch.stack([row_of(700, seed) for seed in range(12)]), SequenceRng(6).at_positions(0, 12)
    together = draw_keyed(rows.view(3, 4, -1), numbers.view(3, 4)).flatten().tolist()
    assert together == [int(draw_keyed(row, number)) for row, number in zip(rows, numbers)]


@pytest.mark.slow
def test_rounding_changes_a_keyed_draw_only_with_a_probability_of_its_own_size() -> None:
    """An error of 1e-3 over 600 draws: fewer than 4e-3 of them change, 2.4; 13 would have probability 1e-6."""
    error, count = 1e-3, 600
    numbers = SequenceRng(7).at_positions(0, count)
    rows = torch.softmax(torch.randn(count, 5000, generator=torch.Generator().manual_seed(2)), dim=-1)
    other = rows * (1 + error * torch.linspace(-1, 1, 5000))
    keyed, inverted = (int((by(rows, numbers) != by(other, numbers)).sum()) for by in (draw_keyed, draw))
    assert keyed < 13
    assert inverted > 100, "a cumulative sum carries the error on to all tokens behind it"


@pytest.mark.parametrize(
    "more", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"presence_penalty": 0.5}, {"logit_bias": {3: 1.0}}]
)
def test_only_a_temperature_is_drawn_plainly(more: dict[str, Any]) -> None:
    assert SamplingParams(temperature=0.7).plainly_drawn
    assert not SamplingParams().plainly_drawn
    assert not SamplingParams(temperature=0.7, **more).plainly_drawn
