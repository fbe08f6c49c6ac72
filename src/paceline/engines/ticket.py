"""A request on its way through the engine, and what it is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.core.protocols import Output, TokenLogprob
from paceline.core.sequence import Sequence
from paceline.errors import PacelineError


@dataclass(frozen=True, slots=True)
class Growth:
    """What one round added to one text. The first `accepted` tokens are guesses that stood.

    error: the text is lost, and this is why. Nothing comes after an error or a finish_reason.
    """

    tokens: tuple[int, ...] = ()
    accepted: int = 0
    drafted: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: str | None = None
    error: PacelineError | None = None


@dataclass(slots=True, eq=False)
class Ticket:
    """One text, where its growth is sent, and what the scheduler must remember of it."""

    text: Sequence
    tell: Callable[[Growth], None]
    arrival: int = 0  # its place in the order of all requests
    started: float | None = None  # when its prompt was first taken up
    parts: list[Output] = field(default_factory=list)  # outputs of a prompt read in chunks
