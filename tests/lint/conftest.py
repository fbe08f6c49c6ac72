"""The default model's own answers with its states over them: computed once, read by every head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.hub.tokenizer import load_tokenizer
from paceline.lint.target import StatedText, TargetFacts, stated
from paceline.train.corpus import TrainingSequence
from paceline.train.task import TrainingTarget
from paceline.train.teacher import Teacher

ANSWERS = Path(__file__).parent / "answers.json"  # greedy answers of the default model: [start, tokens] of each


def stored_answers(count: int) -> list[TrainingSequence]:
    return [TrainingSequence(tokens, start, greedy=True) for start, tokens in json.loads(ANSWERS.read_text())[:count]]


@pytest.fixture(scope="session")
def default_target(default_model: Any, default_folder: Path) -> TrainingTarget:
    return TrainingTarget("default", default_model, load_tokenizer(default_folder, "default"), Teacher(default_model))


@pytest.fixture(scope="session")
def default_facts(default_target: TrainingTarget) -> TargetFacts:
    return TargetFacts.of(default_target)


@pytest.fixture(scope="session")
def default_text(default_target: TrainingTarget) -> StatedText:
    """Two answers: enough to tell coarse mistakes."""
    return stated(default_target.teacher, stored_answers(2))
