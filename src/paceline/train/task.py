"""What training knows of a kind of drafter: its task in training, and the spec that makes one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.runners.loading import eos_token_ids_of
from paceline.train.corpus import Corpus, CorpusSplit, TrainingBatch, frequent_tokens
from paceline.train.losses import ROWS_AT_A_TIME
from paceline.train.teacher import Teacher

MEASURED_DRAFT_TOKENS = 5  # draft tokens that drafters without a natural number of them are measured with


class TrainingTask(Protocol):
    """A drafter in training: its weights, its loss, its draft tokens, its files."""

    @property
    def module(self) -> nn.Module:
        """What is trained; its state is what a checkpoint holds."""

    def start(self, sample: TrainingBatch) -> None:
        """Set the first weights. sample: some sequences, to measure scales on."""

    def start_from(self, folder: Path, sample: TrainingBatch) -> None:
        """Set the first weights to those of a trained drafter. Raises OptionError or WeightsError where it cannot."""

    def loss(self, batch: TrainingBatch) -> Tensor:
        """A scalar with gradients."""

    def draft_tokens(self, batch: TrainingBatch) -> Tensor:
        """int64 [batch, length, k]: with tokens up to t + 1 given, entry [:, t, j] is the draft of token t + 2 + j.

        Earlier draft tokens are taken as correct: after a wrong one the later ones do not count.
        """

    def export(self, folder: Path) -> None:
        """Write the drafter in the layouts that other programs load."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainingTarget:
    """A loaded target with its tokenizer and teacher. folder: its files; None where it was made in memory."""

    name: str
    model: Any
    tokenizer: Any
    teacher: Teacher
    folder: Path | None = None

    def frequent_ids(self, parts: CorpusSplit, draft_vocab_size: int) -> Tensor:
        """Ascending ids of the most frequent tokens; end-of-sequence tokens are always among them."""
        eos_ids = eos_token_ids_of(self.model)
        return frequent_tokens(parts.train, self.teacher.vocab_size, draft_vocab_size, eos_ids)


@dataclass(frozen=True, slots=True, eq=False)
class HeadAdaptation:
    """A trained head that goes on learning, with its own shape.

    sample            some sequences, to measure scales on
    corpus            what it will be trained on: frequent tokens take the place of unused ones in its vocabulary; None:
                      the vocabulary stays
    num_draft_tokens  draft tokens in a row that it is trained for and measured with
    """

    folder: Path
    sample: TrainingBatch
    corpus: Corpus | None
    num_draft_tokens: int


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """One trainable kind of drafter.

    name     as in `paceline train NAME`
    summary  one line for help
    usage    options of the other commands that use the result in OUT
    options  dataclass of the kind's own settings
    build    the task for a target, its data and these options
    adapt    the task of a head that is trained already (see HeadAdaptation); None: this kind cannot go on from one
    check_target  raises OptionError, before any data is generated, for a target and options that cannot be trained
    check_adaptable  raises OptionError for the head in a directory that cannot
    """

    name: str
    summary: str
    usage: str
    options: type
    build: Callable[[TrainingTarget, CorpusSplit, Any], TrainingTask]
    adapt: Callable[[TrainingTarget, HeadAdaptation], TrainingTask] | None = None
    check_target: Callable[[TrainingTarget, Any], None] = lambda *_: None
    check_adaptable: Callable[[Path], None] = lambda _: None


@dataclass(frozen=True, slots=True, eq=False)
class Positions:
    """Positions u of a batch whose next token belongs to an answer (or, everywhere, to the sequence)."""

    row: Tensor
    column: Tensor

    @classmethod
    def of(cls, batch: TrainingBatch, first: int, everywhere: bool = False) -> Positions:
        """All such positions from `first` on."""
        selected = batch.inside(1) if everywhere else batch.answers(1)
        selected[:, :first] = False
        row, column = selected.nonzero(as_tuple=True)
        return cls(row, column)

    def __len__(self) -> int:
        return int(self.row.shape[0])

    def numbered(self, shape: torch.Size) -> Tensor:
        """int64 of the batch's shape: the number of each of these positions; 0 elsewhere."""
        numbers = torch.zeros(shape, dtype=torch.int64, device=self.row.device)
        numbers[self.row, self.column] = torch.arange(len(self), device=self.row.device)
        return numbers

    def pick(self, states: Tensor, back: int = 0) -> Tensor:
        """[batch, length, …] -> [positions, …], `back` tokens earlier."""
        return states[self.row, self.column - back]


def shifted(tokens: Tensor, steps: int) -> Tensor:
    """tokens[:, t + steps] at t; 0 behind the end."""
    return torch.nn.functional.pad(tokens[:, steps:], (0, steps))


def chained_drafts(best: Tensor, count: int) -> Tensor:
    """Draft tokens [batch, length, count] of a drafter that reads its own drafts; best[:, t] predicts token t + 1."""
    return torch.stack([shifted(best, 1 + step) for step in range(count)], dim=-1)


def in_parts(states: Tensor, rows: int = ROWS_AT_A_TIME) -> Iterator[Tensor]:
    """[…, size] flattened, a bounded number of rows at a time."""
    yield from torch.split(states.flatten(0, -2), rows)
