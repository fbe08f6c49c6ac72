"""A teacher that remembers gives the states of one that does not, and reads nothing twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.train.corpus import BatchSampler, Corpus, TrainingBatch, TrainingSequence
from paceline.train.remembering_teacher import RememberingTeacher
from paceline.train.teacher import TargetStates, Teacher

LAYERS = (1, 3)
BATCH_TOKENS = 128


class CountingTeacher(RememberingTeacher):
    """Counts the rows that it reads."""

    num_rows = 0

    def states(self, tokens: Tensor) -> TargetStates:
        self.num_rows += tokens.shape[0]
        return super().states(tokens)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """Lengths of 5 to 40; two sequences end with the token that padding is made of."""
    rng = torch.Generator().manual_seed(0)
    seqs = [torch.randint(1, 32, (5 + index,), generator=rng).tolist() for index in range(35)]
    seqs += [[*seqs[0], 0], [*seqs[0], 0, 0]]
    return Corpus.of([TrainingSequence(tokens, 2) for tokens in seqs])


def batches(corpus: Corpus, epochs: int) -> list[TrainingBatch]:
    sampler = BatchSampler(corpus, BATCH_TOKENS, 0)
    return [sampler.batch(indices) for number in range(epochs) for indices in sampler.epoch(number)]


def assert_same(teacher: Teacher, target_model: Any, batch: TrainingBatch) -> None:
    states, expected = (each.batch_states(batch, LAYERS) for each in (teacher, Teacher(target_model)))
    inside = batch.inside(0)
    assert states.final.shape == expected.final.shape and states.features.shape == expected.features.shape
    torch.testing.assert_close(states.final[inside], expected.final[inside])
    torch.testing.assert_close(states.features[inside], expected.features[inside])


def test_a_sequence_is_read_once_whatever_batch_it_is_in(target_model: Any, corpus: Corpus) -> None:
    teacher = CountingTeacher(target_model, 1 << 30)
    for batch in batches(corpus, epochs=3):
        assert_same(teacher, target_model, batch)
    assert teacher.num_rows == len(corpus)


def test_other_layers_of_a_sequence_are_other_states(target_model: Any, corpus: Corpus) -> None:
    teacher = CountingTeacher(target_model, 1 << 30)
    [batch, *_] = batches(corpus, epochs=1)
    teacher.batch_states(batch, (2,))
    assert_same(teacher, target_model, batch)


def test_what_does_not_fit_is_forgotten_and_read_again(target_model: Any, corpus: Corpus) -> None:
    teacher = CountingTeacher(target_model, 0)
    for batch in batches(corpus, epochs=2):
        assert_same(teacher, target_model, batch)
    assert teacher.num_rows == 2 * len(corpus) and not teacher.num_bytes


def test_memory_stays_below_its_limit(target_model: Any, corpus: Corpus) -> None:
    whole = RememberingTeacher(target_model, 1 << 30)
    for batch in batches(corpus, epochs=1):
        whole.batch_states(batch, LAYERS)
    limit = whole.num_bytes * 4 // 5
    teacher = CountingTeacher(target_model, limit)
    for batch in batches(corpus, epochs=2):
        assert_same(teacher, target_model, batch)
        assert 0 < teacher.num_bytes <= limit
    assert len(corpus) < teacher.num_rows < 2 * len(corpus)
