"""The training loop: batches in a fixed order, checkpoints that are whole or not there, the same losses after --resume.

It knows a drafter only as a `Task`. Several GPUs (torchrun) each take their share of every step's batches and average
gradients; they hold the same weights throughout.
"""

from __future__ import annotations

import json
import math
import pickle
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from paceline.core.stats import SpecStats
from paceline.errors import OptionError, OutOfMemory, TrainingDiverged, WeightsError
from paceline.train import distributed
from paceline.train.atomic import replacing, write_text
from paceline.train.corpus import Batch, Batches, Split
from paceline.train.measure import autocast, measure
from paceline.train.task import Task

CHECKPOINT = "checkpoint.pt"
LOG = "log.jsonl"


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """How long and how fast.

    steps, seconds  stop after either; the learning rate falls to zero towards whichever comes first
    batch_tokens    padded tokens a step and process
    rate            of AdamW at its highest, after warmup (a share of the whole)
    save_every      steps between checkpoints, or save_seconds if those are over first
    measure_every   steps between measurements on the held-out slice
    """

    steps: int = 4000
    seconds: float = float("inf")
    batch_tokens: int = 16384
    rate: float = 1e-3
    warmup: float = 0.03
    weight_decay: float = 0.01
    clip: float = 1.0
    save_every: int = 250
    save_seconds: float = 120.0
    measure_every: int = 250
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch_tokens < 1 or self.save_every < 1 or self.measure_every < 1:
            raise OptionError("steps, batch tokens and the intervals of saving and measuring must be 1 or more")
        if not self.rate > 0 or not self.seconds > 0:
            raise OptionError("the learning rate and the time must be above 0")


@dataclass(frozen=True, slots=True)
class Measurement:
    """Acceptance on the held-out slice after some steps."""

    step: int
    tokens_per_step: float
    by_position: list[float]


@dataclass(slots=True)
class History:
    """All that happened so far; part of every checkpoint."""

    losses: list[float] = field(default_factory=list)
    measured: list[Measurement] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    @property
    def step(self) -> int:
        return len(self.losses)


@dataclass(frozen=True, slots=True)
class TrainingProgress:
    """What a watcher is shown after every step."""

    step: int
    progress: float  # 0 to 1
    loss: float
    rate: float
    tokens_per_second: float
    seconds_left: float
    measured: Measurement | None


Watcher = Callable[[TrainingProgress], None]


def shape_of_rate(progress: float, warmup: float) -> float:
    """Share of the highest rate: a straight rise, then half a cosine down to zero."""
    if progress < warmup:
        return (progress + 1e-3) / (warmup + 1e-3)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))


class Loop:
    """Trains one task on one split, in one folder."""

    def __init__(self, task: Task, split: Split, folder: Path, options: LoopOptions, watch: Watcher = lambda _: None):
        self._task, self._split, self._folder, self._options, self._watch = task, split, folder, options, watch
        self._device = next(task.module.parameters()).device
        self._trained = [weight for weight in task.module.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(_groups(task, options), lr=options.rate, betas=(0.9, 0.95), eps=1e-8)
        self.history = History()
        self._saved = 0.0  # seconds of training behind the last checkpoint
        self._mark = {"seed": options.seed, "batch_tokens": options.batch_tokens, "texts": len(split.train)}
        self._mark["tokens"] = int(split.train.tokens.size)

    def run(self, resume: bool = False) -> History:
        """Train to the end. Raises TrainingDiverged, OutOfMemory, or OptionError for a checkpoint of something else.

        The beginning is saved too: whenever the process is killed, it goes on from the same weights and texts.
        """
        if resume and (self._folder / CHECKPOINT).is_file():
            self._load()
        else:
            distributed.alike(self._task.module.state_dict())
            self.save()
        self._open_log()
        batches = Batches(self._split.train, self._options.batch_tokens, self._options.seed)
        began = time.monotonic() - self.history.seconds
        if not self.history.measured:
            self._measure()
        try:
            mine = distributed.share()
            self._steps(batches.from_step(self.history.step, mine.number, mine.of), began)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory("a training step does not fit; choose a smaller --batch-tokens") from error
        self._measure()
        self.save()
        return self.history

    def _steps(self, batches: Iterator[Batch], began: float) -> None:
        options, history = self._options, self.history
        progress = self._progress(began)
        while progress < 1:
            batch = next(batches)
            rate = options.rate * shape_of_rate(progress, options.warmup)
            loss = self._step(batch, rate)
            history.losses.append(loss)
            history.tokens += int(batch.lengths.sum())
            history.seconds = time.monotonic() - began
            self._note(loss, rate)
            if history.step % options.measure_every == 0:
                self._measure()
            if history.step % options.save_every == 0 or history.seconds - self._saved > options.save_seconds:
                self.save()
            progress = self._progress(began)
            self._watch(self._moment(loss, rate, progress))

    def _progress(self, began: float) -> float:
        """By steps, or by the clock where time is what is limited."""
        by_clock = (time.monotonic() - began) / self._options.seconds
        return max(self.history.step / self._options.steps, distributed.largest(by_clock, self._device))

    def _step(self, batch: Batch, rate: float) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        with autocast(self._device):
            loss = self._task.loss(batch.to(self._device))
        torch.autograd.backward(loss)
        distributed.average_gradients(self._trained)
        norm = torch.nn.utils.clip_grad_norm_(self._trained, self._options.clip)
        value = float(loss.detach())
        if not math.isfinite(value) or not math.isfinite(float(norm)):
            raise TrainingDiverged(
                f"the loss became {value} in step {self.history.step + 1} (gradient norm {float(norm)}). The last good "
                f"weights are in {self._folder}; start again with a smaller --rate than {self._options.rate:g}"
            )
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return value

    def _measure(self) -> None:
        held_out = Batches(self._split.held_out, self._options.batch_tokens, 0)
        stats: SpecStats = measure(self._task, held_out.once())
        found = Measurement(self.history.step, stats.tokens_per_step, stats.acceptance_by_position)
        if self.history.measured and self.history.measured[-1].step == found.step:
            self.history.measured.pop()
        self.history.measured.append(found)

    def _moment(self, loss: float, rate: float, progress: float) -> TrainingProgress:
        history = self.history
        speed = history.tokens / max(history.seconds, 1e-9)
        left = history.seconds * (1 - progress) / max(progress, 1e-9)
        last = history.measured[-1] if history.measured else None
        return TrainingProgress(history.step, progress, loss, rate, speed, left, last)

    # --- files --------------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint; it is whole or not there."""
        self._saved = self.history.seconds
        if not distributed.share().first:
            return
        state = {
            "module": self._task.module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "losses": self.history.losses,
            "measured": [(m.step, m.tokens_per_step, m.by_position) for m in self.history.measured],
            "tokens": self.history.tokens,
            "seconds": self.history.seconds,
            "mark": self._mark,
        }
        with replacing(self._folder / CHECKPOINT) as unfinished:
            torch.save(state, unfinished)

    def _load(self) -> None:
        path = self._folder / CHECKPOINT
        try:
            state: dict[str, Any] = torch.load(path, map_location=self._device, weights_only=True)
            if state["mark"] != self._mark:
                raise OptionError(f"{path} belongs to other data, seed or batch size; resume with those, or start anew")
            self._task.module.load_state_dict(state["module"])
            self._optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, KeyError, EOFError, ValueError, pickle.UnpicklingError) as error:
            if isinstance(error, OptionError):
                raise
            raise WeightsError(f"{path} cannot be continued from: {str(error).splitlines()[0]}") from error
        measured = [Measurement(*entry) for entry in state["measured"]]
        self.history = History(list(state["losses"]), measured, state["tokens"], state["seconds"])
        self._saved = self.history.seconds

    def _open_log(self) -> None:
        """One line a step. Steps after the last checkpoint will be done again, so their lines go."""
        if distributed.share().first:
            lines = [json.dumps({"step": step + 1, "loss": loss}) for step, loss in enumerate(self.history.losses)]
            write_text(self._folder / LOG, "".join(line + "\n" for line in lines))

    def _note(self, loss: float, rate: float) -> None:
        if not distributed.share().first:
            return
        with (self._folder / LOG).open("a") as log:
            log.write(json.dumps({"step": self.history.step, "loss": loss, "rate": rate}) + "\n")


def _groups(task: Task, options: LoopOptions) -> list[dict[str, Any]]:
    """Matrices decay, scales do not."""
    trained = [weight for weight in task.module.parameters() if weight.requires_grad]
    matrices = [weight for weight in trained if weight.ndim > 1]
    scales = [weight for weight in trained if weight.ndim <= 1]
    return [{"params": matrices, "weight_decay": options.weight_decay}, {"params": scales, "weight_decay": 0.0}]
