"""An engine's parts over the toy model: exact, and fast enough for thousands of rounds."""

from __future__ import annotations

from paceline.core.budget import Budget, FixedBudget
from paceline.core.distribution import SamplingParams
from paceline.core.protocols import Drafter, Outputs, Row, Slot
from paceline.core.sequence import Sequence
from paceline.core.stopping import StopRules
from paceline.decode.generate import run
from paceline.decode.judge import Judge
from paceline.decode.step import Machinery
from paceline.drafting.ngram import Ngram
from paceline.engines.ticket import Growth, Ticket
from paceline.runners.table import TableRunner


class WatchedRunner(TableRunner):
    """Counts open slots and passes, and breaks on demand."""

    def __init__(self) -> None:
        super().__init__(vocab_size=6, order=2, seed=3)
        self.open_slots: set[int] = set()
        self.passes: list[list[int]] = []  # widths of the rows of each pass
        self.breaks: Exception | None = None

    def open(self) -> Slot:  # type: ignore[override]
        slot = super().open()
        self.open_slots.add(id(slot))
        return slot

    def fork(self, slot: Slot, length: int) -> Slot:  # type: ignore[override]
        twin = super().fork(slot, length)
        self.open_slots.add(id(twin))
        return twin

    def close(self, slot: Slot) -> None:
        super().close(slot)
        self.open_slots.discard(id(slot))

    def forward(self, rows: list[Row], *, last_only: bool = False) -> Outputs:
        if self.breaks is not None:
            error, self.breaks = self.breaks, None
            raise error
        self.passes.append([len(row.parents) for row in rows])
        return super().forward(rows, last_only=last_only)


def machinery(runner: TableRunner, drafter: Drafter | None = None, budget: Budget | None = None) -> Machinery:
    return Machinery(runner, drafter or Ngram(), budget or FixedBudget(3), Judge())


def text_of(prompt: list[int], new_tokens: int, sampling: SamplingParams | None = None) -> Sequence:
    return Sequence(prompt, sampling or SamplingParams(), StopRules(new_tokens))


def ticket_of(text: Sequence) -> tuple[Ticket, list[Growth]]:
    """A ticket and the list its growth is written to."""
    told: list[Growth] = []
    return Ticket(text, told.append), told


def alone(prompt: list[int], new_tokens: int) -> list[int]:
    """What plain decoding of one text writes."""
    text = text_of(prompt, new_tokens)
    for _ in run([text], machinery(TableRunner(vocab_size=6, order=2, seed=3), budget=FixedBudget(0))):
        pass
    return text.written


def tokens_of(told: list[Growth]) -> list[int]:
    return [token for growth in told for token in growth.tokens]
