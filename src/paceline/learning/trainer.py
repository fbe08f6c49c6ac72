"""The trainer of a server that learns from traffic, in its own process: `python -m paceline.learning.trainer DIR PID`.

Again and again it takes the latest sequences of the ring, trains the head in use on them, and compares both heads on
held-out sequences. A better one is proposed to the server. Killed at any time, it goes on from its last checkpoint.
It has the lowest priority, and the server stops it while requests are under way.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.learning.files import LearnerOptions, LearningFolder, TrainerRecord
    from paceline.learning.ring import Traffic
    from paceline.train.corpus import Corpus
    from paceline.train.task import TrainingTarget, TrainingTask

LOG = logging.getLogger(__name__)
POLL_SECONDS = 1.0
LOWEST_NICENESS = 19
PARENT_DEATH_SIGNAL, KILL = 1, 9  # of Linux' prctl
FEWEST_SEQS, FEWEST_NEW_SEQS, FEWEST_HELD_OUT = 48, 32, 7  # with fewer than 7 pairs no sign test can reach its error
MAX_SEQ_LEN = 1024
MAX_TRAIN_TOKENS, MAX_HELD_OUT_TOKENS = 1 << 20, 1 << 15
MAX_HELD_OUT, MAX_MEASURED = 128, 16
MOST_STEPS = 16  # times the steps of the first attempt
LEARNING_RATE = 5e-4
MAX_STATES_BYTES = 512 << 20  # of the target, kept between the steps of an attempt: half of a step would compute them


@dataclass(frozen=True, slots=True)
class AttemptPlan:
    """One training: the head it starts from, its steps, and the end of the traffic it uses."""

    start: int
    steps: int
    end: int


@dataclass(frozen=True, slots=True)
class TrainingSizes:
    """Tokens of a batch, and draft tokens in a row that a head is trained for."""

    batch_tokens: int
    num_draft_tokens: int


class LearningTrainer:
    """Trains one head after another in a learning folder."""

    def __init__(self, folder: LearningFolder, options: LearnerOptions, target: TrainingTarget) -> None:
        from paceline.train.placement import on_gpu
        from paceline.train.registry import trainer_spec

        self._folder, self._options, self._target = folder, options, target
        adapt = trainer_spec(options.method).adapt
        assert adapt is not None, "the server has checked it"
        self._adapt = adapt
        self._sizes = TrainingSizes(16384, 5) if on_gpu(options.device) else TrainingSizes(1024, 3)

    def run(self) -> None:
        """Until killed."""
        while True:
            if not self.turn():
                time.sleep(POLL_SECONDS)

    def turn(self) -> bool:
        """One attempt, new or resumed. False: there is nothing to do yet."""
        if self._folder.proposal is not None:  # the server has not decided yet
            return False
        plan = self._plan_under_way() or self._new_plan()
        if plan is None:
            return False
        try:
            self._train(plan)
        except PacelineError as error:  # a damaged checkpoint, a diverged loss: begin again with later traffic
            self._forget(plan, error)
        return True

    def _forget(self, plan: AttemptPlan, error: PacelineError) -> None:
        from paceline.learning.files import TrainerRecord

        record = self._folder.trainer
        self._folder.note("failed", reason=str(error))
        self._folder.write("trainer", TrainerRecord(record.attempts, record.failures, plan.end))
        shutil.rmtree(self._folder.attempt)

    # --- planning -----------------------------------------------------------------------------------------------------

    def _plan_under_way(self) -> AttemptPlan | None:
        path = self._folder.attempt / "plan.json"
        if not path.is_file():
            return None
        plan = AttemptPlan(**json.loads(path.read_text(encoding="utf-8")))
        if plan.start == self._folder.state.head:
            return plan
        shutil.rmtree(self._folder.attempt)  # another head is in use by now
        return None

    def _new_plan(self) -> AttemptPlan | None:
        """A plan with its sequences on disk, once there is enough traffic that no attempt has used."""
        from paceline.learning.ring import latest, read_ring
        from paceline.train.atomic import write_text

        state, record = self._folder.state, self._folder.trainer
        if state.on_trial:  # it may be rolled back
            return None
        traffic = read_ring(self._folder.ring, MAX_SEQ_LEN)
        if not _is_enough(traffic, record):
            return None
        shutil.rmtree(self._folder.attempt, ignore_errors=True)
        latest(traffic.train, MAX_TRAIN_TOKENS, len(traffic.train)).save(self._folder.attempt / "train.safetensors")
        latest(traffic.held_out, MAX_HELD_OUT_TOKENS, MAX_HELD_OUT).save(
            self._folder.attempt / "held_out.safetensors"
        )
        steps = self._options.steps * min(MOST_STEPS, 2**record.failures)
        plan = AttemptPlan(state.head, steps, traffic.end)
        write_text(self._folder.attempt / "plan.json", json.dumps(asdict(plan)) + "\n")
        return plan

    # --- training -----------------------------------------------------------------------------------------------------

    def _train(self, plan: AttemptPlan) -> None:
        from paceline.learning.ring import latest
        from paceline.train.corpus import Corpus, CorpusSplit, split
        from paceline.train.loop import LoopOptions, TrainingLoop

        attempt = self._folder.attempt
        train, held_out = (Corpus.load(attempt / f"{name}.safetensors") for name in ("train", "held_out"))
        start = self._folder.head(plan.start, self._options)
        task = self._task(start, train, adapt_vocabulary=True)
        options = LoopOptions(
            steps=plan.steps,
            batch_tokens=self._sizes.batch_tokens,
            learning_rate=LEARNING_RATE,
            save_every=max(1, min(50, plan.steps // 8)),
            eval_every=10**9,
        )
        # The loop keeps the best of its weights by sequences of its own: those held out for the comparison stay unseen.
        parts = split(train, 0)
        measured = CorpusSplit(parts.train, latest(parts.held_out, MAX_HELD_OUT_TOKENS, MAX_MEASURED))
        TrainingLoop(task, measured, attempt / "training", options).run(resume=True)
        self._compare(plan, task, train, held_out)

    def _task(self, head: Path, train: Corpus, *, adapt_vocabulary: bool) -> TrainingTask:
        from paceline.train.corpus import BatchSampler
        from paceline.train.task import HeadAdaptation

        sample = next(BatchSampler(train, self._sizes.batch_tokens, 0).once()).to(self._target.teacher.device)
        corpus = train if adapt_vocabulary else None
        return self._adapt(self._target, HeadAdaptation(head, sample, corpus, self._sizes.num_draft_tokens))

    def _compare(self, plan: AttemptPlan, task: TrainingTask, train: Corpus, held_out: Corpus) -> None:
        """Write the head as a server would load it, and replay both on the held-out sequences."""
        from paceline.learning.decision import ReplayComparison
        from paceline.learning.files import Proposal
        from paceline.learning.replay import replay

        state = self._folder.state
        number = 1 + max(self._folder.trainer.attempts, state.head, state.previous)  # of no head in use
        folder = self._folder.head(number, self._options)
        shutil.rmtree(folder, ignore_errors=True)
        task.export(folder)
        heads = (self._folder.head(plan.start, self._options), folder)
        tasks = (self._task(head, train, adapt_vocabulary=False) for head in heads)
        old, new = (replay(each, held_out, self._sizes.batch_tokens) for each in tasks)
        comparison = ReplayComparison(old.accepted, new.accepted)
        rates = (round(old.first_token_rate, 4), round(new.first_token_rate, 4))
        self._finish(Proposal(number, plan.start, *rates, comparison.p_value), plan, comparison.is_better)

    def _finish(self, proposal: Any, plan: AttemptPlan, is_better: bool) -> None:
        """Propose the head, or forget it. The record is last but one: a kill before it repeats the comparison."""
        from paceline.learning.files import TrainerRecord

        record = self._folder.trainer
        if is_better:
            self._folder.write("proposal", proposal)
        else:
            self._folder.note("no better", **asdict(proposal), steps=plan.steps)
            shutil.rmtree(self._folder.head(proposal.head, self._options), ignore_errors=True)
        failures = 0 if is_better else record.failures + 1
        self._folder.write("trainer", TrainerRecord(record.attempts + 1, failures, plan.end))
        shutil.rmtree(self._folder.attempt)


def _is_enough(traffic: Traffic, record: TrainerRecord) -> bool:
    enough = len(traffic.train) >= FEWEST_SEQS and len(traffic.held_out) >= FEWEST_HELD_OUT
    return enough and traffic.end - record.end >= FEWEST_NEW_SEQS


# --- the process ------------------------------------------------------------------------------------------------------


def end_with_the_server(server: int) -> None:
    """Ask the kernel to kill this process when the server dies: a stopped process could not notice it itself."""
    import ctypes

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, KILL)
    if os.getppid() != server:  # it is dead already
        sys.exit(1)


def take_idle_time_only() -> None:
    """The lowest priority there is: beside other programs of the machine it runs on what they leave."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):  # another system, or a container that forbids it
        os.nice(LOWEST_NICENESS)


def main(path: str) -> None:
    from paceline.learning.files import LearningFolder

    folder = LearningFolder(Path(path))
    options = folder.options
    assert options is not None, "the server writes them before it starts the trainer"
    LearningTrainer(folder, options, open_training_target(options)).run()


def open_training_target(options: LearnerOptions) -> TrainingTarget:
    import torch

    from paceline.train.placement import on_gpu
    from paceline.train.remembering_teacher import RememberingTeacher
    from paceline.train.run import TrainOptions, open_target

    if on_gpu(options.device):  # on a CPU it may take every core: it runs only while no request does
        torch.set_num_threads(1)
    target = open_target(TrainOptions.of(options.method, "", {"model": options.model}), options.device)
    return replace(target, teacher=RememberingTeacher(target.model, MAX_STATES_BYTES))


if __name__ == "__main__":
    end_with_the_server(int(sys.argv[2]))
    take_idle_time_only()
    logging.basicConfig(level=logging.INFO)
    main(sys.argv[1])
