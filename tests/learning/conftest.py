"""A tiny target, a head for it that cannot draft a single token of what it writes, and traffic.

target   a Llama that mostly follows a cycle of tokens, in a folder
head     an EAGLE-3 head with random weights, whose vocabulary has none of the tokens of the cycle
traffic  greedy sequences of the target
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.heads.eagle3 import Eagle3Head
from paceline.heads.registry import save_head
from paceline.train.corpus import TrainingSequence
from paceline.train.eagle import EagleOptions, eagle_config
from paceline.train.teacher import Teacher
from tests.train.conftest import greedy_sequences, one_thread, random_prompts, target_folder, target_model

__all__ = ["one_thread", "target_folder", "target_model"]  # fixtures of the trainer's tests, used here too

DRAFT_VOCAB_SIZE, UNUSED_TOKENS = 64, range(100, 164)
NEW_TOKENS = 32


@pytest.fixture(scope="session")
def target(target_folder: Path) -> Path:
    return target_folder


@pytest.fixture(scope="session")
def write_head(target_model: Any) -> Callable[[Path, int], Path]:
    """Writes a random head into a folder; a seed gives the same one."""

    def write(folder: Path, seed: int) -> Path:
        config = eagle_config(Teacher(target_model), EagleOptions(draft_vocab_size=DRAFT_VOCAB_SIZE))
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            head = Eagle3Head(replace(config, feature_layers=(1, 2, 3)))
        head.choose_vocabulary(torch.tensor(UNUSED_TOKENS))
        save_head(head, folder)
        return folder

    return write


@pytest.fixture(scope="session")
def head(write_head: Callable[[Path, int], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head") / "first", 0)


@pytest.fixture(scope="session")
def traffic(target_model: Any) -> list[TrainingSequence]:
    prompts = random_prompts(96)
    return greedy_sequences(target_model, prompts, len(prompts[0]) + NEW_TOKENS)
