"""The training loop: batches in a fixed order, checkpoints that are whole or absent, the same losses after --resume.

The loop knows a drafter only as a `TrainingTask`. Several processes (torchrun) each take their share of every step's
batches and average gradients; they hold the same weights throughout.
"""

from __future__ import annotations

import json
import math
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from paceline.core.stats import SpecStats
from paceline.errors import OptionError, OutOfMemory, TrainingDiverged, WeightsError
from paceline.train import distributed
from paceline.train.atomic import replacing, write_text
from paceline.train.corpus import BatchSampler, CorpusSplit, TrainingBatch
from paceline.train.measure import measure
from paceline.train.optimizers import OPTIMIZERS, optimizer_of
from paceline.train.options import setting
from paceline.train.placement import autocast, on_gpu
from paceline.train.task import TrainingTask

CHECKPOINT, BEST = "checkpoint.pt", "best.pt"
LOG = "log.jsonl"
SECONDS_BETWEEN_CHECKPOINTS = 120.0
MAX_GRADIENT_NORM = 1.0
STEPS_WITHOUT_LIMIT = 10**9


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """How long the training is and how it learns. It ends after `steps` or `minutes`, whichever comes first.

    0 means the usual amount, which is in the help.
    """

    steps: int = setting(0, "training steps (4000 on a GPU, 1000 on a CPU)")
    minutes: float = setting(0.0, "stop training after this long (no limit)", "M")
    batch_tokens: int = setting(0, "padded tokens per step and process (16384 on a GPU, 2048 on a CPU)")
    learning_rate: float = setting(1e-3, "highest learning rate; it falls to zero towards the end", "R")
    warmup: float = setting(0.03, "share of the training in which the learning rate rises", "S")
    save_every: int = setting(250, "steps between checkpoints, and at least every two minutes")
    eval_every: int = setting(0, "steps between measurements on held-out sequences (a twentieth of the steps)")
    patience: int = setting(0, "stop after this many measurements without more accepted tokens (never)")
    optimizer: str = setting("adamw", f"{' or '.join(OPTIMIZERS)}", "NAME")
    seed: int = setting(0, "seed of data, order and weights")

    def __post_init__(self) -> None:
        if self.steps < 0 or self.batch_tokens < 0 or self.eval_every < 0 or self.save_every < 1:
            raise OptionError("--steps, --batch-tokens, --save-every and --eval-every must be 1 or more")
        if not self.learning_rate > 0 or self.minutes < 0:
            raise OptionError("--learning-rate and --minutes must be above 0")
        if self.optimizer not in OPTIMIZERS:
            raise OptionError(f"there is no optimizer {self.optimizer!r}; choose {' or '.join(OPTIMIZERS)}")

    @property
    def seconds(self) -> float:
        return 60 * self.minutes or float("inf")

    def resolved(self, gpu: bool) -> LoopOptions:
        """The same with every amount filled in."""
        usual_steps, batch_tokens, eval_every = (4000, 16384, 250) if gpu else (1000, 2048, 50)
        steps = self.steps or (STEPS_WITHOUT_LIMIT if self.minutes else usual_steps)
        eval_every = min(self.eval_every or max(1, steps // 20), self.eval_every or eval_every)
        return replace(self, steps=steps, batch_tokens=self.batch_tokens or batch_tokens, eval_every=eval_every)


@dataclass(frozen=True, slots=True)
class HeldOutMeasurement:
    """Acceptance on the held-out sequences after some training steps."""

    step: int
    tokens_per_step: float
    by_position: list[float]


@dataclass(slots=True)
class TrainingHistory:
    """Everything a training has done so far; part of every checkpoint."""

    losses: list[float] = field(default_factory=list)
    measurements: list[HeldOutMeasurement] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def step(self) -> int:
        return len(self.losses)

    @property
    def best(self) -> HeldOutMeasurement:
        """The measurement with the most tokens per step; the first of several."""
        return max(self.measurements, key=lambda measurement: measurement.tokens_per_step)

    @property
    def measurements_since_best(self) -> int:
        return sum(measurement.step > self.best.step for measurement in self.measurements)


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """What a watcher is shown after every step."""

    step: int
    fraction: float  # 0 to 1
    loss: float
    learning_rate: float
    tokens_per_second: float
    seconds_left: float
    measurement: HeldOutMeasurement | None


TrainingWatcher = Callable[[TrainingProgress], None]
BestWatcher = Callable[[TrainingHistory], None]


def learning_rate_share(fraction: float, warmup: float) -> float:
    """Share of the highest learning rate: a linear rise, then half a cosine down to zero."""
    if fraction < warmup:
        return (fraction + 1e-3) / (warmup + 1e-3)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (fraction - warmup) / (1 - warmup))))


class TrainingLoop:
    """Trains one task on one split, in one folder."""

    def __init__(
        self,
        task: TrainingTask,
        split: CorpusSplit,
        folder: Path,
        options: LoopOptions,
        watch: TrainingWatcher = lambda _: None,
        watch_best: BestWatcher = lambda _: None,
    ) -> None:
        """watch_best: called while the module holds the best weights so far."""
        self._task, self._split, self._watch, self._watch_best = task, split, watch, watch_best
        self._device = next(task.module.parameters()).device
        self._options = options = options.resolved(on_gpu(self._device))
        self._weights = [weight for weight in task.module.parameters() if weight.requires_grad]
        self._optimizer = optimizer_of(options.optimizer, self._weights, options.learning_rate)
        self._files = _TrainingFiles(folder, _data_key(split, options))
        self.history = TrainingHistory()
        self._saved_seconds = 0.0  # of training in the last checkpoint

    def run(self, resume: bool = False) -> TrainingHistory:
        """Train to the end. Raises TrainingDiverged, OutOfMemory, or OptionError for a checkpoint of other data.

        The first state is saved too: a process killed at any time resumes with the same weights and sequences.
        In the end the module holds the weights that were measured best: the loss may fall while acceptance does.
        """
        if resume and self._files.has_checkpoint:
            self.history = self._files.load(self._task.module, self._optimizer, self._device)
            self._saved_seconds = self.history.seconds
        else:
            distributed.broadcast(self._task.module.state_dict())
            self.save()
        self._files.open_log(self.history)
        if not self.history.measurements:
            self._measure()
        self._train()
        self._measure()
        self.save()
        self._files.load_best(self._task.module, self._device)
        return self.history

    def _train(self) -> None:
        sampler = BatchSampler(self._split.train, self._options.batch_tokens, self._options.seed)
        process = distributed.process_rank()
        batches = sampler.from_step(self.history.step, process.rank, process.world_size)
        try:
            self._steps(batches, time.monotonic() - self.history.seconds)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory("a training step does not fit; choose a smaller --batch-tokens") from error

    def _steps(self, batches: Iterator[TrainingBatch], began: float) -> None:
        options, history = self._options, self.history
        fraction = self._fraction(began)
        while fraction < 1 and not self._stale:
            batch = next(batches)
            learning_rate = options.learning_rate * learning_rate_share(fraction, options.warmup)
            loss = self._step(batch, learning_rate)
            history.losses.append(loss)
            history.tokens += int(batch.lengths.sum())
            history.seconds = time.monotonic() - began
            self._files.log(history, learning_rate)
            if history.step % options.eval_every == 0:
                self._measure()
            if history.step % options.save_every == 0 or self._unsaved_seconds > SECONDS_BETWEEN_CHECKPOINTS:
                self.save()
            fraction = self._fraction(began)
            self._watch(self._progress(loss, learning_rate, fraction))

    @property
    def _stale(self) -> bool:
        """The last measurements, as many as the patience allows, were no better than one before them."""
        return 0 < self._options.patience <= self.history.measurements_since_best

    @property
    def _unsaved_seconds(self) -> float:
        return self.history.seconds - self._saved_seconds

    def _fraction(self, began: float) -> float:
        """How much of the training is done, 0 to 1: by steps, or by the clock where time is limited."""
        by_clock = (time.monotonic() - began) / self._options.seconds
        done = max(self.history.step / self._options.steps, distributed.largest(by_clock, self._device))
        return min(1.0, done)  # the last step may end after the time has

    def _step(self, batch: TrainingBatch, learning_rate: float) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        with autocast(self._device):
            loss = self._task.loss(batch.to(self._device))
        torch.autograd.backward(loss)
        distributed.average_gradients(self._weights)
        norm = torch.nn.utils.clip_grad_norm_(self._weights, MAX_GRADIENT_NORM)
        value = float(loss.detach())
        self._check_finite(value, float(norm))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return value

    def _check_finite(self, loss: float, norm: float) -> None:
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise TrainingDiverged(
                f"the loss became {loss} in step {self.history.step + 1} (gradient norm {norm}). The last good weights "
                f"are in {self._files.folder}; start again with a smaller --learning-rate than "
                f"{self._options.learning_rate:g}"
            )

    def _measure(self) -> None:
        sampler = BatchSampler(self._split.held_out, self._options.batch_tokens, 0)
        stats: SpecStats = measure(self._task, sampler.once())
        measurement = HeldOutMeasurement(self.history.step, stats.tokens_per_step, stats.acceptance_by_position)
        measurements = self.history.measurements
        if measurements and measurements[-1].step == measurement.step:
            measurements.pop()
        measurements.append(measurement)
        if self.history.best is measurement:
            self._files.save_best(self._task.module)
            self._watch_best(self.history)

    def _progress(self, loss: float, learning_rate: float, fraction: float) -> TrainingProgress:
        history = self.history
        tokens_per_second = history.tokens / max(history.seconds, 1e-9)
        seconds_left = history.seconds * (1 - fraction) / max(fraction, 1e-9)
        measurement = history.measurements[-1] if history.measurements else None
        return TrainingProgress(
            history.step, fraction, loss, learning_rate, tokens_per_second, seconds_left, measurement
        )

    def save(self) -> None:
        """Write a checkpoint; it is whole or absent."""
        self._saved_seconds = self.history.seconds
        self._files.save(self._task.module, self._optimizer, self.history)


@dataclass(frozen=True, slots=True)
class _TrainingFiles:
    """Checkpoint and log of one training. Only the first process writes.

    data_key  what a checkpoint must have been trained on to be resumed
    """

    folder: Path
    data_key: dict[str, int]

    @property
    def has_checkpoint(self) -> bool:
        return (self.folder / CHECKPOINT).is_file()

    def save(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, history: TrainingHistory) -> None:
        if not distributed.process_rank().first:
            return
        weights = {"module": module.state_dict(), "optimizer": optimizer.state_dict()}
        with replacing(self.folder / CHECKPOINT) as unfinished:
            torch.save({**weights, **asdict(history), "data_key": self.data_key}, unfinished)

    def save_best(self, module: torch.nn.Module) -> None:
        if distributed.process_rank().first:
            with replacing(self.folder / BEST) as unfinished:
                torch.save(module.state_dict(), unfinished)

    def load_best(self, module: torch.nn.Module, device: torch.device) -> None:
        """Restore the weights that were measured best, in every process."""
        distributed.wait_for_all()
        module.load_state_dict(torch.load(self.folder / BEST, map_location=device, weights_only=True))

    def load(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> TrainingHistory:
        """Restore weights and optimizer in place, and return the history."""
        path = self.folder / CHECKPOINT
        try:
            state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
            same_data = state["data_key"] == self.data_key
            if same_data:
                module.load_state_dict(state["module"])
                optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, KeyError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise WeightsError(f"{path} cannot be resumed from: {str(error).splitlines()[0]}") from error
        if not same_data:
            raise OptionError(f"{path} belongs to other data, seed or batch size; resume with those, or start again")
        measurements = [HeldOutMeasurement(**measurement) for measurement in state["measurements"]]
        return TrainingHistory(list(state["losses"]), measurements, state["tokens"], state["seconds"])

    def open_log(self, history: TrainingHistory) -> None:
        """One line per step. Steps after the last checkpoint are repeated, so their lines are dropped."""
        if distributed.process_rank().first:
            lines = [json.dumps({"step": step + 1, "loss": loss}) for step, loss in enumerate(history.losses)]
            write_text(self.folder / LOG, "".join(line + "\n" for line in lines))

    def log(self, history: TrainingHistory, learning_rate: float) -> None:
        if distributed.process_rank().first:
            line = {"step": history.step, "loss": history.losses[-1], "learning_rate": learning_rate}
            with (self.folder / LOG).open("a") as log:
                log.write(json.dumps(line) + "\n")


def _data_key(split: CorpusSplit, options: LoopOptions) -> dict[str, int]:
    size = {"num_seqs": len(split.train), "tokens": int(split.train.tokens.size)}
    return {"seed": options.seed, "batch_tokens": options.batch_tokens, **size}
