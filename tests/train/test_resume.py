"""A killed training resumes with the same losses, and a failing one says what to do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import OptionError, TrainingDiverged, WeightsError
from paceline.train.corpus import Corpus, CorpusSplit, TrainingSequence
from paceline.train.loop import CHECKPOINT, LoopOptions, TrainingLoop
from paceline.train.task import chained_drafts
from tests.train.conftest import small_training

STEPS, KILLED_AFTER = 40, 7


def losses(out: Path) -> list[float]:
    lines = (out / "training" / "log.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def lines_written(out: Path) -> int:
    log = out / "training" / "log.jsonl"
    return log.read_text().count("\n") if log.is_file() else 0


def kill_when(process: subprocess.Popen[bytes], ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 200
    while not ready():
        assert process.poll() is None, "the training ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_a_killed_and_resumed_training_equals_an_uninterrupted_one(
    target_folder: Path, sequences_folder: Path, tmp_path: Path, train: Callable[..., Any]
) -> None:
    arguments = [str(argument) for argument in small_training(target_folder, sequences_folder, STEPS)]
    arguments += ["--ttt-steps", "2", "--draft-vocab-size", "64", "--save-every", "3"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, "-m", "paceline", "train", "eagle", "--out", str(killed), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        kill_when(process, lambda: lines_written(killed) >= KILLED_AFTER)
    before = losses(killed)
    assert KILLED_AFTER <= len(before) < STEPS
    status, output = train("eagle", "--out", killed, *arguments)
    assert status == 2 and "--resume" in output.err, "a started training is not thrown away"
    assert train("eagle", "--out", killed, "--resume")[0] == 0, "everything else is on record"
    assert train("eagle", "--out", whole, *arguments)[0] == 0
    assert len(losses(whole)) == STEPS
    assert losses(killed) == losses(whole)
    assert before == losses(whole)[: len(before)]


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_with_advice(
    target_folder: Path, sequences_folder: Path, tmp_path: Path, train: Callable[..., Any]
) -> None:
    arguments = [*small_training(target_folder, sequences_folder, 30), "--learning-rate", "1e30"]
    status, output = train("exit-adapter", "--out", tmp_path / "out", *arguments)
    assert status == 2
    assert "the loss became" in output.err and "smaller --learning-rate than 1e+30" in output.err
    assert (tmp_path / "out" / "training" / CHECKPOINT).is_file(), "the last good weights"


# --- the loop alone ---------------------------------------------------------------------------------------------------


class Bigram:
    """The smallest task: a table that predicts the next token."""

    def __init__(self, nan_at: int = 0) -> None:
        self.module = torch.nn.Linear(16, 16, bias=False)
        torch.nn.init.zeros_(self.module.weight)
        self.calls, self._nan_at = 0, nan_at

    def start(self, sample: Any) -> None: ...

    def loss(self, batch: Any) -> torch.Tensor:
        self.calls += 1
        logits = self.module.weight[batch.tokens[:, :-1]]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.tokens[:, 1:].flatten())
        return loss * float("nan") if self.calls == self._nan_at else loss

    def draft_tokens(self, batch: Any) -> torch.Tensor:
        return chained_drafts(self.module.weight[batch.tokens].argmax(dim=-1), 2)

    def export(self, folder: Path) -> None: ...


def counting(num_seqs: int = 24) -> CorpusSplit:
    corpus = Corpus.of(
        [TrainingSequence([(start + offset) % 16 for offset in range(24)], 2) for start in range(num_seqs)]
    )
    return CorpusSplit(corpus, corpus.pick(corpus.lengths.argsort()[:4]))


def test_nan_stops_before_it_reaches_the_weights(tmp_path: Path) -> None:
    task = Bigram(nan_at=4)
    with pytest.raises(TrainingDiverged, match="in step 4"):
        TrainingLoop(task, counting(), tmp_path, LoopOptions(10, batch_tokens=256)).run()
    assert torch.isfinite(task.module.weight).all()


@pytest.mark.parametrize("stop", [1, 3, 5, 6])
def test_a_loop_resumes_from_its_last_checkpoint_wherever_it_stopped(tmp_path: Path, stop: int) -> None:
    options = LoopOptions(8, batch_tokens=256, save_every=3, learning_rate=0.1)
    whole = TrainingLoop(Bigram(), counting(), tmp_path / "whole", options).run()
    with pytest.raises(TrainingDiverged):
        TrainingLoop(Bigram(nan_at=stop + 1), counting(), tmp_path / "cut", options).run()
    task = Bigram()
    resumed = TrainingLoop(task, counting(), tmp_path / "cut", options).run(resume=True)
    assert resumed.losses == whole.losses
    assert task.calls == 8 - stop // 3 * 3, "only the steps after the last checkpoint are repeated"
    assert resumed.measurements[-1] == whole.measurements[-1]
    assert whole.measurements[-1].tokens_per_step > whole.measurements[0].tokens_per_step


def test_a_checkpoint_of_other_data_or_half_a_checkpoint_is_refused(tmp_path: Path) -> None:
    options = LoopOptions(2, batch_tokens=256)
    TrainingLoop(Bigram(), counting(), tmp_path, options).run()
    with pytest.raises(OptionError, match="belongs to other data"):
        TrainingLoop(Bigram(), counting(30), tmp_path, options).run(resume=True)
    whole = (tmp_path / CHECKPOINT).read_bytes()
    (tmp_path / CHECKPOINT).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WeightsError, match="cannot be resumed from"):
        TrainingLoop(Bigram(), counting(), tmp_path, options).run(resume=True)


class Fading(Bigram):
    """A task whose drafts get worse from its second measurement on, while its loss falls."""

    measured = 0

    def draft_tokens(self, batch: Any) -> torch.Tensor:
        self.measured += 1
        best = (batch.tokens + 1) % 16
        right = chained_drafts(best, 2)
        return right if self.measured <= 2 else right + 1


def test_training_stops_by_acceptance_and_ends_with_the_best_weights(tmp_path: Path) -> None:
    task, exported = Fading(), []
    options = LoopOptions(50, batch_tokens=256, eval_every=2, patience=3, learning_rate=0.1)
    loop = TrainingLoop(
        task, counting(), tmp_path, options, watch_best=lambda history: exported.append(history.best.step)
    )
    history = loop.run()
    assert history.step == 6 and history.losses[-1] < history.losses[0], "three measurements were worse than the first"
    assert history.best.step == 0 and exported == [0]
    assert not task.module.weight.any(), "the weights of the best measurement, which are the first"


def test_a_second_best_measurement_replaces_the_first(tmp_path: Path) -> None:
    task = Bigram()
    history = TrainingLoop(task, counting(), tmp_path, LoopOptions(8, batch_tokens=256, learning_rate=0.1)).run()
    assert history.best.step > 0 and bool(task.module.weight.any())


def test_time_alone_can_end_a_training(tmp_path: Path) -> None:
    times_left: list[float] = []
    options = LoopOptions(minutes=0.005, batch_tokens=256)
    history = TrainingLoop(
        Bigram(), counting(), tmp_path, options, lambda progress: times_left.append(progress.seconds_left)
    ).run()
    assert 0 < history.step < 10**6 and times_left[-1] < 0.3
