"""The folder of a server that learns. The server and the trainer speak through it, and a restart finds all of it.

DIR/ring/            sequences (ring.py)
DIR/heads/000001/    the heads that were proposed: the one in use and the one before it
DIR/attempt/         the training under way: its sequences, checkpoint and log
DIR/options.json     written by the server at its start: what the trainer needs to know
DIR/state.json       written by the server: which head is in use, and what it is compared with
DIR/proposal.json    written by the trainer: a head that is better on held-out sequences; deleted when it is decided
DIR/trainer.json     written by the trainer: what it has tried
DIR/history.jsonl    one line for every swap, rollback and failed attempt
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import OptionError
from paceline.train.atomic import write_text

Record = TypeVar("Record")
FIRST_HEAD = 0  # the number of the head that the server was started with


@dataclass(frozen=True, slots=True)
class LearnerOptions:
    """What the trainer is told.

    first_head  directory of the head that the server was started with
    steps       training steps of the first attempt
    """

    model: str
    method: str
    first_head: str
    device: str
    steps: int


@dataclass(frozen=True, slots=True)
class LearnerState:
    """Which head is in use.

    before  [accepted, offered] at position 1 of the live sequences before the last swap; empty: it is settled
    """

    head: int = FIRST_HEAD
    previous: int = FIRST_HEAD
    swaps: int = 0
    rollbacks: int = 0
    before: list[list[int]] = field(default_factory=list)
    on_trial: bool = False


@dataclass(frozen=True, slots=True)
class Proposal:
    """A head that is better than the one it started from, with the replayed acceptance at position 1 of both."""

    head: int
    start: int
    old_acceptance: float
    new_acceptance: float
    p_value: float


@dataclass(frozen=True, slots=True)
class TrainerRecord:
    """What the trainer has tried.

    attempts  trainings that were compared
    failures  in a row whose head was no better
    end       number of the latest sequence it has used, plus one
    """

    attempts: int = 0
    failures: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class LearningFolder:
    """Paths and records."""

    path: Path

    @property
    def ring(self) -> Path:
        return self.path / "ring"

    @property
    def attempt(self) -> Path:
        return self.path / "attempt"

    def head(self, number: int, options: LearnerOptions) -> Path:
        return Path(options.first_head) if number == FIRST_HEAD else self.path / "heads" / f"{number:06d}"

    # --- records ------------------------------------------------------------------------------------------------------

    def write(self, name: str, record: Any) -> None:
        write_text(self.path / f"{name}.json", json.dumps(asdict(record)) + "\n")

    def read(self, name: str, kind: type[Record]) -> Record | None:
        """A record, or None where there is none. Raises OptionError for one that cannot be read."""
        path = self.path / f"{name}.json"
        try:
            return kind(**json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            raise OptionError(f"{path} cannot be read ({error}); delete it, or choose another --learn DIR") from error

    @property
    def state(self) -> LearnerState:
        return self.read("state", LearnerState) or LearnerState()

    @property
    def options(self) -> LearnerOptions | None:
        return self.read("options", LearnerOptions)

    @property
    def proposal(self) -> Proposal | None:
        return self.read("proposal", Proposal)

    @property
    def trainer(self) -> TrainerRecord:
        return self.read("trainer", TrainerRecord) or TrainerRecord()

    def drop_proposal(self) -> None:
        (self.path / "proposal.json").unlink(missing_ok=True)

    def note(self, event: str, **figures: Any) -> None:
        """One line of the history."""
        line = {"time": round(time.time(), 3), "event": event, **figures}
        with (self.path / "history.jsonl").open("a", encoding="utf-8") as history:
            history.write(json.dumps(line) + "\n")

    def drop_heads(self, *kept: int) -> None:
        """Delete the heads that are not in use any more."""
        for folder in (self.path / "heads").glob("[0-9]*"):
            if int(folder.name) not in kept:
                shutil.rmtree(folder, ignore_errors=True)


def opened_folder(path: Path, options: LearnerOptions) -> LearningFolder:
    """The folder, for this model and head. Raises OptionError where it belongs to others or cannot be written."""
    folder = LearningFolder(path)
    earlier = folder.options
    if earlier is not None and (earlier.model, earlier.method) != (options.model, options.method):
        raise OptionError(f"{path} has learned for {earlier.model} with {earlier.method}; choose another --learn DIR")
    if earlier is not None and Path(earlier.first_head).name != Path(options.first_head).name:
        raise OptionError(f"{path} has learned from the head in {earlier.first_head}; choose another --learn DIR")
    try:
        path.mkdir(parents=True, exist_ok=True)
        folder.write("options", options)
    except OSError as error:
        raise OptionError(f"--learn {path} cannot be written: {error.strerror or error}") from error
    return folder
