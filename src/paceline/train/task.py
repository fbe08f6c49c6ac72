"""What the training loop knows of a drafter in training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.train.corpus import Batch
from paceline.train.losses import ROWS_AT_A_TIME

MEASURED_GUESSES = 5  # guesses in a row that drafters without a natural number of them are measured with


class Task(Protocol):
    """One kind of drafter: its weights, its loss, its guesses, its files."""

    word: str  # as in `paceline train WORD`

    @property
    def module(self) -> nn.Module:
        """What is trained; its state is what a checkpoint holds."""

    def start(self, sample: Batch) -> None:
        """Set the first weights. sample: some texts, to take measures from."""

    def loss(self, batch: Batch) -> Tensor:
        """A scalar with gradients."""

    def draft_tokens(self, batch: Batch) -> Tensor:
        """int64 [batch, width, k]: with tokens up to t + 1 known, entry [:, t, j] guesses token t + 2 + j.

        Earlier guesses are taken to be right: where one is not, nobody asks for the later ones.
        """

    def export(self, folder: Path) -> None:
        """Write the drafter so that others can load it."""


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Places u of a batch whose next token belongs to an answer (or, everywhere, to the text), from `reach` on."""

    row: Tensor
    column: Tensor

    @classmethod
    def of(cls, batch: Batch, reach: int, everywhere: bool = False) -> Places:
        wanted = batch.inside(1) if everywhere else batch.answers(1)
        wanted[:, :reach] = False
        row, column = wanted.nonzero(as_tuple=True)
        return cls(row, column)

    def __len__(self) -> int:
        return int(self.row.shape[0])

    def pick(self, states: Tensor, back: int = 0) -> Tensor:
        """[batch, width, …] -> [places, …], `back` tokens earlier."""
        return states[self.row, self.column - back]


def ahead(tokens: Tensor, steps: int) -> Tensor:
    """tokens[:, t + steps] at t; what lies behind the end is 0."""
    return torch.nn.functional.pad(tokens[:, steps:], (0, steps))


def following(best: Tensor, count: int) -> Tensor:
    """DraftOutput [batch, width, count] of a drafter that reads its own guesses as text. best[:, t] says token t + 1."""
    return torch.stack([ahead(best, 1 + step) for step in range(count)], dim=-1)


def in_parts(states: Tensor, rows: int = ROWS_AT_A_TIME) -> Iterator[Tensor]:
    """[…, size] flattened, a bounded number of rows at a time."""
    yield from torch.split(states.flatten(0, -2), rows)
