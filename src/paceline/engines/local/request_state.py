"""A request on its way through the engine, and what it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.core.sequence import Sequence
from paceline.core.types import RowOutput, TokenLogprob
from paceline.errors import PacelineError


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step added to one sequence. The first `accepted` tokens are draft tokens that stood.

    error: the sequence is lost, and this is why. NoDraft comes after an error or a finish_reason.
    """

    tokens: tuple[int, ...] = ()
    accepted: int = 0
    drafted: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None
    error: PacelineError | None = None


@dataclass(slots=True, eq=False)
class RequestState:
    """One sequence, where its growth is sent, and what the scheduler must remember of it."""

    seq: Sequence
    tell: Callable[[StepOutput], None]
    arrival: int = 0  # its place in the order of all requests
    started: float | None = None  # when its prompt was first taken up
    chunks: list[RowOutput] = field(default_factory=list)  # outputs of a prompt read in chunks
