"""The trainer, in this process: what it proposes, and what a kill leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.heads.eagle3 import Eagle3Head
from paceline.heads.registry import load_head
from paceline.learning.decision import SWAP_ERROR
from paceline.learning.files import LearnerOptions, LearnerState, LearningFolder, opened_folder
from paceline.learning.ring import TrafficRing
from paceline.learning.trainer import LearningTrainer, open_training_target
from paceline.train.corpus import TrainingSequence
from paceline.train.loop import TrainingLoop
from tests.learning.conftest import UNUSED_TOKENS

STEPS = 40


def learning_folder(path: Path, target: Path, head: Path, traffic: list[TrainingSequence]) -> LearningFolder:
    folder = opened_folder(path, LearnerOptions(str(target), "eagle", str(head), "cpu", STEPS))
    ring = TrafficRing(folder.ring, 10**6)
    for seq in traffic:
        ring.add(seq.tokens, seq.start)
    ring.flush()
    return folder


def trainer_of(folder: LearningFolder) -> LearningTrainer:
    options = folder.options
    assert options is not None
    return LearningTrainer(folder, options, open_training_target(options))


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


@pytest.mark.slow
def test_a_killed_trainer_goes_on_and_proposes_a_head_that_drafts_what_the_target_writes(
    tmp_path: Path, target: Path, head: Path, traffic: list[TrainingSequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = learning_folder(tmp_path, target, head, traffic)
    save = TrainingLoop.save
    saved: list[int] = []

    def save_and_die(loop: TrainingLoop) -> None:
        save(loop)
        saved.append(loop.history.step)
        if loop.history.step:
            raise Killed

    monkeypatch.setattr(TrainingLoop, "save", save_and_die)
    with pytest.raises(Killed):
        trainer_of(folder).turn()
    assert folder.proposal is None and folder.trainer.attempts == 0
    monkeypatch.setattr(TrainingLoop, "save", lambda loop: (saved.append(loop.history.step), save(loop)))
    trainer = trainer_of(folder)
    assert trainer.turn()
    assert saved[0] == 0 and saved[1] > 0 and saved[2] > saved[1], "it went on from its checkpoint"
    proposal = folder.proposal
    assert proposal is not None and proposal.p_value <= SWAP_ERROR
    assert proposal.new_acceptance >= proposal.old_acceptance + 0.3
    assert not folder.attempt.exists() and folder.trainer.attempts == 1
    learned = load_head(tmp_path / "heads" / "000001", Eagle3Head)
    assert not set(learned.target_ids.tolist()) <= set(UNUSED_TOKENS), "its vocabulary follows the traffic"
    assert not trainer.turn(), "nothing is tried while the server has not decided"
    folder.drop_proposal()
    folder.write("state", LearnerState(head=1, swaps=1))
    assert not trainer.turn(), "nothing is tried without new traffic"


def test_too_little_traffic_is_not_trained_on(
    tmp_path: Path, target: Path, head: Path, traffic: list[TrainingSequence]
) -> None:
    folder = learning_folder(tmp_path, target, head, traffic[:20])
    assert not trainer_of(folder).turn()
    assert not folder.attempt.exists()
