"""The random numbers of one sequence."""

from __future__ import annotations

import math

import pytest
import scipy
import torch

from paceline.core.rng import SequenceRng, keyed_exponentials, position_uniform

FALSE_ALARM = 1e-7  # the probability that correct code fails one statistical test of this file


def test_position_uniform_is_spread_evenly() -> None:
    numbers = [position_uniform(seed, place) for seed in range(40) for place in range(100)]
    assert len(set(numbers)) == len(numbers)
    assert min(numbers) >= 0 and max(numbers) < 1
    assert sum(numbers) / len(numbers) == pytest.approx(0.5, abs=0.025)  # 5.4 standard errors
    assert position_uniform(1, 2) != position_uniform(2, 1)


def test_numbers_in_order_depend_on_how_many_were_drawn_and_numbers_by_position_do_not() -> None:
    first, second = SequenceRng(5), SequenceRng(5)
    second.next(3)
    assert torch.equal(first.at_positions(2, 4), second.at_positions(2, 4))
    assert not torch.equal(first.next(4), second.next(4))
    assert torch.equal(SequenceRng(5).next(6), torch.cat([(rng := SequenceRng(5)).next(2), rng.next(4)]))


def test_a_negative_seed_is_a_seed() -> None:
    assert torch.equal(SequenceRng(-1).next(2), SequenceRng(-1).next(2))


# --- keyed by token ---------------------------------------------------------------------------------------------------


def splitmix64(state: int) -> int:
    """In Python's own integers, which neither wrap nor have a sign."""
    mask = (1 << 64) - 1
    state &= mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


def test_a_keyed_number_depends_on_its_key_and_its_counter_alone() -> None:
    uniform = position_uniform(3, 4)
    counters = torch.tensor([0, 1, 77, 151_935, -1, -600])
    numbers = keyed_exponentials(torch.tensor([uniform], dtype=torch.float64), counters)
    for counter, number in zip(counters.tolist(), numbers.tolist()):
        state = splitmix64(int(uniform * 2**53) + counter * 0x9E3779B97F4A7C15)
        assert number == pytest.approx(-math.log(((state >> 12) + 0.5) / 2**52), rel=1e-14)
    alone = keyed_exponentials(torch.tensor([uniform], dtype=torch.float64), counters[2:3])
    assert torch.equal(alone, numbers[2:3])


@pytest.mark.slow
def test_keyed_numbers_are_exponential_along_tokens_and_along_positions() -> None:
    """Kolmogorov-Smirnov over 40,000 numbers, of one key and of as many keys."""
    one = torch.tensor([position_uniform(1, 2)], dtype=torch.float64)
    many = SequenceRng(8).at_positions(0, 40_000)
    for numbers in (keyed_exponentials(one, torch.arange(40_000)), keyed_exponentials(many, torch.tensor(11))):
        assert scipy.stats.kstest(numbers.tolist(), "expon").pvalue > FALSE_ALARM


def test_keyed_numbers_of_neighbours_are_not_correlated() -> None:
    """Six standard errors: fails correct code with probability 2e-9."""
    rows = keyed_exponentials(SequenceRng(8).at_positions(0, 200)[:, None], torch.arange(-100, 400))
    centred = rows - 1.0
    for pair in (centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1]):
        assert abs(float(pair.mean())) < 6 / math.sqrt(pair.numel())


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_keyed_numbers_are_finite_and_above_zero_at_the_edges(uniform: float) -> None:
    numbers = keyed_exponentials(torch.tensor([uniform], dtype=torch.float64), torch.arange(-2000, 200_000))
    assert bool((numbers > 0).all()) and bool(numbers.isfinite().all())
