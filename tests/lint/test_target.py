"""What readings take from the target."""

from __future__ import annotations

import torch

from paceline.lint.target import TargetFacts
from paceline.train.task import TrainingTarget
from paceline.train.teacher import Teacher
from tests.support.tiny import byte_tokenizer, tiny_llama


def test_of_special_tokens_that_are_alike_the_last_is_tried_as_a_mask() -> None:
    model = tiny_llama()
    with torch.no_grad():
        vectors = model.get_input_embeddings().weight
        vectors[256] = vectors[257] * 1.0001
    target = TrainingTarget("tiny", model, byte_tokenizer(), Teacher(model))
    assert TargetFacts.of(target).special_ids == (257, 258)
