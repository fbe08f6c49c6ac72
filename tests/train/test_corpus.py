"""Sequences on disk and in batches: none lost, none twice, the same order from any step on."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.errors import OptionError, WeightsError
from paceline.train.corpus import BatchSampler, Corpus, TrainingSequence, frequent_tokens, shards, split


def corpus(count: int = 40) -> Corpus:
    rng = np.random.default_rng(0)
    lengths = rng.integers(6, 120, count)
    return Corpus.of(
        [
            TrainingSequence([number, *range(2, int(size))], 2, greedy=bool(number % 2))
            for number, size in enumerate(lengths)
        ]
    )


def test_a_shard_comes_back_as_it_was_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    whole = corpus()
    whole.save(tmp_path / "sequences-000.safetensors")
    back = Corpus.load(tmp_path / "sequences-000.safetensors")
    assert all(np.array_equal(getattr(whole, name), getattr(back, name)) for name in Corpus.__slots__)
    assert shards(tmp_path) == [tmp_path / "sequences-000.safetensors"], "nothing half-written is left"
    (tmp_path / "sequences-001.safetensors").write_bytes(b"half a shard")
    with pytest.raises(WeightsError, match="sequences-001"):
        Corpus.load(tmp_path / "sequences-001.safetensors")


def test_repeats_are_dropped_and_long_sequences_are_cut() -> None:
    twice = Corpus.joined([corpus(), corpus()])
    assert len(twice.without_repeats()) == 40
    cut = corpus().cut(30)
    assert cut.lengths.max() == 30 and cut.tokens.size == cut.lengths.sum()


def test_the_held_out_part_is_always_the_same_and_never_trained_on() -> None:
    parts, again = split(corpus(), 1), split(corpus(), 1)
    assert np.array_equal(parts.held_out.tokens, again.held_out.tokens)
    firsts = [set(part.tokens[part.offsets[:-1]].tolist()) for part in (parts.train, parts.held_out)]
    assert not firsts[0] & firsts[1] and len(firsts[0] | firsts[1]) == 40
    with pytest.raises(OptionError, match="too few"):
        split(corpus(3), 0)


def test_every_sequence_is_in_one_batch_of_an_epoch() -> None:
    batches = BatchSampler(corpus(), 512, seed=3)
    seen = [int(row[0]) for batch in batches.once() for row in batch.tokens]
    assert sorted(seen) == list(range(40))
    assert all(batch.tokens.numel() <= 512 for batch in batches.once())


def test_order_from_a_later_step_is_the_rest_of_the_order_from_the_start() -> None:
    batches = BatchSampler(corpus(), 512, seed=3)
    whole = [batch.tokens for batch in itertools.islice(batches.from_step(0), 25)]
    rest = [batch.tokens for batch in itertools.islice(batches.from_step(17), 8)]
    assert all(torch.equal(actual, expected) for actual, expected in zip(whole[17:], rest))


def test_processes_share_an_epoch_and_too_few_sequences_are_refused() -> None:
    batches = BatchSampler(corpus(), 512, seed=3)
    size = len(batches.epoch(0)) // 2
    shares = [[int(b.tokens[0, 0]) for b in itertools.islice(batches.from_step(0, rank, 2), size)] for rank in (0, 1)]
    assert not set(shares[0]) & set(shares[1])
    with pytest.raises(OptionError, match="too few sequences for 100 processes"):
        next(batches.from_step(0, 0, 100))


def test_the_reduced_vocabulary_holds_the_most_frequent_tokens_and_the_end_of_sequence() -> None:
    small = Corpus.of([TrainingSequence([7, 7, 7, 9, 9, 3], 1)])
    assert frequent_tokens(small, 20, 3, frozenset({15})).tolist() == [7, 9, 15]


def test_small_batches_have_little_padding_and_large_ones_few_shapes() -> None:
    corpus = Corpus.of([TrainingSequence([1] * length, 1) for length in range(60, 80)])
    small = [batch.tokens.shape for batch in BatchSampler(corpus, 1024, 0).once()]
    large = [batch.tokens.shape for batch in BatchSampler(corpus, 16384, 0).once()]
    assert all(width % 8 == 0 and rows * width <= 1024 for rows, width in small) and max(small)[1] <= 80
    assert {width for _, width in large} == {128}
