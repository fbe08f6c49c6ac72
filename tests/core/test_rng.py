"""The random numbers of one sequence."""

from __future__ import annotations

import pytest
import torch

from paceline.core.rng import SequenceRng, position_uniform


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
