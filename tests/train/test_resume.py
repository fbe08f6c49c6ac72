"""A training that is killed goes on as if nothing had happened, and one that breaks says so."""

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
from paceline.train.corpus import Corpus, Split, Text
from paceline.train.loop import CHECKPOINT, Loop, LoopOptions
from paceline.train.task import following
from tests.train.conftest import arguments

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


def test_killed_and_resumed_is_the_same_as_never_killed(
    target_folder: Path, texts_folder: Path, tmp_path: Path, train: Callable[..., Any]
) -> None:
    words = [str(word) for word in arguments(target_folder, texts_folder, STEPS)]
    words += ["--unroll", "2", "--vocabulary", "64", "--save-every", "3"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, "-m", "paceline", "train", "eagle", "--out", str(killed), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        kill_when(process, lambda: lines_written(killed) >= KILLED_AFTER)
    before = losses(killed)
    assert KILLED_AFTER <= len(before) < STEPS
    status, output = train("eagle", "--out", killed, *words)
    assert status == 2 and "--resume" in output.err, "a begun training is not thrown away"
    assert train("eagle", "--out", killed, "--resume")[0] == 0, "everything else is on record"
    assert train("eagle", "--out", whole, *words)[0] == 0
    assert len(losses(whole)) == STEPS
    assert losses(killed) == losses(whole)
    assert before == losses(whole)[: len(before)]


def test_a_loss_that_is_no_number_stops_with_advice(
    target_folder: Path, texts_folder: Path, tmp_path: Path, train: Callable[..., Any]
) -> None:
    words = [*arguments(target_folder, texts_folder, 30), "--rate", "1e30"]
    status, output = train("exit", "--out", tmp_path / "out", *words)
    assert status == 2
    assert "the loss became" in output.err and "smaller --rate than 1e+30" in output.err
    assert (tmp_path / "out" / "training" / CHECKPOINT).is_file(), "the last good weights"


# --- the loop alone ---------------------------------------------------------------------------------------------------


class Bigram:
    """The smallest task: a table that says the next token."""

    word = "bigram"

    def __init__(self, poison_at: int = 0) -> None:
        self.module = torch.nn.Linear(16, 16, bias=False)
        torch.nn.init.zeros_(self.module.weight)
        self.calls, self._poison_at = 0, poison_at

    def start(self, sample: Any) -> None: ...

    def loss(self, batch: Any) -> torch.Tensor:
        self.calls += 1
        logits = self.module.weight[batch.tokens[:, :-1]]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.tokens[:, 1:].flatten())
        return loss * float("nan") if self.calls == self._poison_at else loss

    def draft_tokens(self, batch: Any) -> torch.Tensor:
        return following(self.module.weight[batch.tokens].argmax(dim=-1), 2)

    def export(self, folder: Path) -> None: ...


def counting(texts: int = 24) -> Split:
    corpus = Corpus.of([Text([(start + place) % 16 for place in range(24)], 2) for start in range(texts)])
    return Split(corpus, corpus.pick(corpus.lengths.argsort()[:4]))


def test_nan_stops_before_it_reaches_the_weights(tmp_path: Path) -> None:
    task = Bigram(poison_at=4)
    with pytest.raises(TrainingDiverged, match="in step 4"):
        Loop(task, counting(), tmp_path, LoopOptions(10, batch_tokens=256)).run()
    assert torch.isfinite(task.module.weight).all()


@pytest.mark.parametrize("stop", [1, 3, 5, 6])
def test_a_loop_goes_on_from_its_last_checkpoint_wherever_it_stopped(tmp_path: Path, stop: int) -> None:
    options = LoopOptions(8, batch_tokens=256, save_every=3, rate=0.1)
    whole = Loop(Bigram(), counting(), tmp_path / "whole", options).run()
    with pytest.raises(TrainingDiverged):
        Loop(Bigram(poison_at=stop + 1), counting(), tmp_path / "cut", options).run()
    task = Bigram()
    resumed = Loop(task, counting(), tmp_path / "cut", options).run(resume=True)
    assert resumed.losses == whole.losses
    assert task.calls == 8 - stop // 3 * 3, "only what lies behind the last checkpoint is done again"
    assert resumed.measured[-1] == whole.measured[-1]
    assert whole.measured[-1].tokens_per_step > whole.measured[0].tokens_per_step


def test_a_checkpoint_of_other_data_or_half_a_checkpoint_is_refused(tmp_path: Path) -> None:
    options = LoopOptions(2, batch_tokens=256)
    Loop(Bigram(), counting(), tmp_path, options).run()
    with pytest.raises(OptionError, match="belongs to other data"):
        Loop(Bigram(), counting(30), tmp_path, options).run(resume=True)
    whole = (tmp_path / CHECKPOINT).read_bytes()
    (tmp_path / CHECKPOINT).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WeightsError, match="cannot be continued from"):
        Loop(Bigram(), counting(), tmp_path, options).run(resume=True)


def test_time_alone_can_end_a_training(tmp_path: Path) -> None:
    seen: list[float] = []
    options = LoopOptions(10**9, seconds=0.3, batch_tokens=256)
    history = Loop(Bigram(), counting(), tmp_path, options, lambda moment: seen.append(moment.seconds_left)).run()
    assert 0 < history.step < 10**6 and seen[-1] < 0.3
