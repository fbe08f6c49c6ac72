"""An engine's parts over the toy model: exact, and fast enough for thousands of rounds."""

from __future__ import annotations

from paceline.core.draft_length import DraftLengthPolicy, FixedDraftLength
from paceline.core.protocols import Drafter
from paceline.core.sampling import SamplingParams
from paceline.core.sequence import Sequence
from paceline.core.stopping import StopRules
from paceline.core.types import ModelOutput, Row, SequenceCache
from paceline.drafting.ngram import Ngram
from paceline.engines.local.generate import run
from paceline.engines.local.request_state import RequestState, StepOutput
from paceline.engines.local.step import EngineParts
from paceline.engines.local.verifier import Verifier
from paceline.runners.table import TableRunner


class WatchedRunner(TableRunner):
    """Counts open slots and passes, and breaks on demand."""

    def __init__(self) -> None:
        super().__init__(vocab_size=6, order=2, seed=3)
        self.open_slots: set[int] = set()
        self.passes: list[list[int]] = []  # widths of the rows of each pass
        self.breaks: Exception | None = None

    def open(self) -> SequenceCache:  # type: ignore[override]
        seq_cache = super().open()
        self.open_slots.add(id(seq_cache))
        return seq_cache

    def fork(self, seq_cache: SequenceCache, length: int) -> SequenceCache:  # type: ignore[override]
        twin = super().fork(seq_cache, length)
        self.open_slots.add(id(twin))
        return twin

    def close(self, seq_cache: SequenceCache) -> None:
        super().close(seq_cache)
        self.open_slots.discard(id(seq_cache))

    def forward(self, rows: list[Row], *, last_only: bool = False) -> ModelOutput:
        if self.breaks is not None:
            error, self.breaks = self.breaks, None
            raise error
        self.passes.append([len(row.parents) for row in rows])
        return super().forward(rows, last_only=last_only)


def parts(runner: TableRunner, drafter: Drafter | None = None, budget: DraftLengthPolicy | None = None) -> EngineParts:
    return EngineParts(runner, drafter or Ngram(), budget or FixedDraftLength(3), Verifier())


def text_of(prompt: list[int], new_tokens: int, sampling: SamplingParams | None = None) -> Sequence:
    return Sequence(prompt, sampling or SamplingParams(), StopRules(new_tokens))


def ticket_of(seq: Sequence) -> tuple[RequestState, list[StepOutput]]:
    """A ticket and the list its growth is written to."""
    told: list[StepOutput] = []
    return RequestState(seq, told.append), told


def alone(prompt: list[int], new_tokens: int) -> list[int]:
    """What plain decoding of one text writes."""
    seq = text_of(prompt, new_tokens)
    for _ in run([seq], parts(TableRunner(vocab_size=6, order=2, seed=3), budget=FixedDraftLength(0))):
        pass
    return seq.generated


def tokens_of(told: list[StepOutput]) -> list[int]:
    return [token for step_output in told for token in step_output.tokens]
