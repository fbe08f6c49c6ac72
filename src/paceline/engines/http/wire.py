"""What an engine over HTTP knows of the server's language: what to post for a request, and how to read the events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from paceline.core.draft_tree import chain
from paceline.core.stats import SpecStats
from paceline.core.types import Request, RequestOutput
from paceline.engines.http.acceptance import DraftCounts
from paceline.engines.http.client import Json


@dataclass(frozen=True, slots=True)
class Call:
    """One request as it is posted."""

    path: str
    body: Json


class ResponseReader(Protocol):
    """Turns the events of one answer into outputs, and counts.

    finish_reason  None until the server says that the answer is complete
    stop_reason    the stop string or stop token that ended the answer; None: another reason, or it has not said
    prompt_tokens  that the server counted, num_cached_tokens of them from its prefix cache; None: it has not said
    knows_drafts   whether the answer says how many draft tokens there were; else `counts` may be set
    """

    finish_reason: str | None
    stop_reason: int | str | None
    prompt_tokens: int | None
    num_cached_tokens: int | None
    counts: DraftCounts | None

    @property
    def knows_drafts(self) -> bool: ...

    @property
    def stats(self) -> SpecStats: ...
    @property
    def draft_lengths(self) -> dict[int, int]: ...

    def feed(self, event: Json) -> list[RequestOutput]:
        """Outputs of one event; the last output, with the reason and the stats, is not among them."""

    def end(self) -> str:
        """The answer is over, complete or not: finish the counts. Returns characters that were held back."""


class Wire(Protocol):
    """The language of one kind of server."""

    def check(self, request: Request) -> None:
        """Raise OptionError for what this server cannot do, before anything is sent."""

    def call(self, request: Request) -> Call: ...
    def reader(self, request: Request) -> ResponseReader: ...


@dataclass(slots=True)
class StepCounter:
    """Counts the steps of a server that reports its draft tokens as running totals.

    A step shows as growing totals together with its first token; its accepted draft tokens come first, then the
    target's own token.
    """

    stats: SpecStats = field(default_factory=SpecStats)
    draft_lengths: dict[int, int] = field(default_factory=dict)
    _total_drafted: int = 0
    _total_accepted: int = 0
    _drafted: int = 0  # of the step under way
    _accepted: int = 0
    _emitted: int = 0

    def totals(self, drafted: int, accepted: int) -> None:
        """The totals that come with the next token."""
        if drafted > self._total_drafted:
            self.close_step()
            self._drafted, self._accepted = drafted - self._total_drafted, accepted - self._total_accepted
            self._total_drafted, self._total_accepted = drafted, accepted

    def token(self) -> bool:
        """Count a token; returns whether it is an accepted draft token."""
        if self.step_complete:
            self.close_step()
        self._emitted += 1
        return self._emitted <= self._accepted

    @property
    def step_complete(self) -> bool:
        return self._emitted > self._accepted

    @property
    def num_drafted(self) -> int | None:
        """Draft tokens of the step that the last token has completed."""
        return self._drafted if self.step_complete else None

    def close_step(self) -> None:
        """The step under way is over; one that ended inside its accepted tokens was cut by the end of the sequence."""
        if self._emitted:
            accepted, cut = min(self._accepted, self._emitted), self._emitted <= self._accepted
            self.stats.add_step(chain([0] * self._drafted), accepted, self._emitted, cut)
            self.draft_lengths[self._drafted] = self.draft_lengths.get(self._drafted, 0) + 1
        self._drafted = self._accepted = self._emitted = 0
