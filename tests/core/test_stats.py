"""The one definition of every rate."""

from __future__ import annotations

import pytest
import torch

from paceline.core.draft_tree import DraftTree, chain, empty, merge
from paceline.core.stats import SpecStats


def test_plain_decoding_is_one_token_a_step() -> None:
    stats = SpecStats()
    for _ in range(5):
        stats.add_step(empty(), accepted=0, emitted=1, cut=False)
    assert (stats.steps, stats.tokens_per_step, stats.acceptance_rate) == (5, 1.0, 0.0)
    assert stats.acceptance_by_position == []


def test_plain_steps_taken_as_one_count_as_several() -> None:
    stats = SpecStats()
    stats.add_plain(4)
    assert (stats.steps, stats.new_tokens, stats.tokens_per_step) == (4, 4, 1.0)


def test_rates_by_position() -> None:
    stats = SpecStats()
    stats.add_step(chain([1, 2, 3]), accepted=3, emitted=4, cut=False)
    stats.add_step(chain([1, 2, 3]), accepted=1, emitted=2, cut=False)
    stats.add_step(chain([1]), accepted=0, emitted=1, cut=False)
    assert (stats.drafted, stats.accepted, stats.new_tokens) == (7, 4, 7)
    assert stats.acceptance_rate == pytest.approx(4 / 7)
    assert stats.tokens_per_step == pytest.approx(1 + 4 / 3)
    assert stats.acceptance_by_position == pytest.approx([2 / 3, 1 / 2, 1 / 2])


def test_draft_tokens_past_the_end_do_not_count() -> None:
    stats = SpecStats()
    stats.add_step(chain([1, 2, 3, 4]), accepted=2, emitted=2, cut=True)
    assert (stats.drafted, stats.accepted, stats.acceptance_rate) == (2, 2, 1.0)


def test_probes_are_not_drafted() -> None:
    stats = SpecStats()
    stats.add_step(DraftTree(torch.tensor([1, 2, 3]), [-1, 0, -1], None, probes=1), accepted=2, emitted=3, cut=False)
    assert stats.drafted == 2


def test_a_tree_offers_a_depth_once() -> None:
    stats = SpecStats()
    stats.add_step(merge([[1, 2], [3, 4]], 4), accepted=1, emitted=2, cut=False)
    assert (stats.drafted, stats.offered_at, stats.accepted_at) == (4, [1, 1], [1, 0])


def test_stats_add_up() -> None:
    one, other = SpecStats(seconds=1.0), SpecStats(seconds=2.0)
    one.add_step(chain([1]), accepted=1, emitted=2, cut=False)
    other.add_step(chain([1, 2, 3]), accepted=2, emitted=3, cut=False)
    one.add(other)
    assert (one.new_tokens, one.steps, one.drafted, one.accepted, one.seconds) == (5, 2, 4, 3, 3.0)
    assert one.offered_at == [2, 1, 1] and one.accepted_at == [2, 1, 0]
    assert one.tokens_per_second == pytest.approx(5 / 3)


def test_counts_of_a_sequence_that_is_counting_meanwhile_are_added_as_far_as_they_are_there() -> None:
    total, counting = SpecStats(), SpecStats(steps=2, offered_at=[2], accepted_at=[1, 1])
    total.add(counting)
    total.add(SpecStats(steps=2, offered_at=[2, 1, 1], accepted_at=[1]))
    assert (total.offered_at, total.accepted_at) == ([4, 1, 1], [2, 1, 0])
