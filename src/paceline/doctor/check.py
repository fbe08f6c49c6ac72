"""One check of a scenario while it is made: answers compared, faults found, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.doctor.answer import Answer
from paceline.doctor.client import RequestFailed, RequestRefused, ServerClient
from paceline.doctor.near_ties import binomial_tail, common_bytes, drift, num_near_ties, parting, plausible
from paceline.doctor.query import Query
from paceline.doctor.result import CheckResult, Fault, Status

MAX_FAULTS = 3  # of one check that are written down
UNEXPLAINED = 0.25  # share of answers that may differ where a server gives no log-probabilities
SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class Exchange:
    """A request and its answer."""

    client: ServerClient
    query: Query
    answer: Answer

    @property
    def curl(self) -> str:
        return self.client.curl(self.query)


class Check:
    """Collects what one check sees. near_tie, drift_limit: of log-probabilities; level: its false alarm probability."""

    def __init__(self, name: str, near_tie: float, drift_limit: float, level: float) -> None:
        self.name, self.near_tie, self.drift_limit, self._level = name, near_tie, drift_limit, level
        self.compared = 0
        self.faults: list[Fault] = []
        self.notes: list[str] = []
        self._missing: list[str] = []
        self._tied = 0  # answers that differ at a near-tie
        self._unexplained: list[Fault] = []  # differences without log-probabilities
        self._references: list[Exchange] = []

    # --- written by scenarios -----------------------------------------------------------------------------------------

    def passed(self, count: int = 1) -> None:
        self.compared += count

    def fault(self, message: str, exchanges: Iterable[Exchange] = (), expected: str = "", got: str = "") -> None:
        self.faults.append(Fault(message, tuple(exchange.curl for exchange in exchanges), expected, got))

    def missing(self, reason: str) -> None:
        """Why something cannot be shown."""
        if reason not in self._missing:
            self._missing.append(reason)

    def note(self, text: str) -> None:
        self.notes.append(text)

    async def same(self, tested: Exchange, reference: Exchange, steps: Iterable[Exchange] = ()) -> bool:
        """Two answers that must be equal, near-ties apart. steps: requests that a repetition sends before."""
        self.compared += 1
        self._references.append(reference)
        if tested.answer.content == reference.answer.content:
            return self._same_logprobs(tested, reference, steps)
        fault = _difference(tested, reference, steps)
        gap = await _gap(tested, reference)
        if gap is None:
            self._unexplained.append(fault)
        elif gap <= self.near_tie:
            self._tied += 1
        else:
            self.faults.append(fault)
        return False

    def _same_logprobs(self, tested: Exchange, reference: Exchange, steps: Iterable[Exchange]) -> bool:
        change = drift(tested.answer.tokens, reference.answer.tokens)
        if change.largest <= self.drift_limit:
            return True
        message = (
            f"the same text, but the log-probability of {change.token.decode(errors='replace')!r} at token "
            f"{change.index + 1} differs by {change.largest:.2g}; rounding explains {self.drift_limit:.2g}"
        )
        text = reference.answer.content
        self.faults.append(Fault(message, tuple(item.curl for item in (*steps, reference, tested)), text, text))
        return False

    # --- at the end ---------------------------------------------------------------------------------------------------

    async def result(self) -> CheckResult:
        await self._count_near_ties()
        self._count_unexplained()
        return CheckResult(self.name, self._status(), self._detail(), self.compared, tuple(self.faults[:MAX_FAULTS]))

    async def _count_near_ties(self) -> None:
        """More answers that differ at near-ties than there are near-ties to differ at are a fault."""
        if self._tied < 3:
            return
        numbers = [
            num_near_ties(answer, self.near_tie)
            for answer in [await _probe(item) for item in self._references]
            if answer
        ]
        p_value = plausible(self._tied, numbers) if len(numbers) == len(self._references) else 1.0
        if p_value < self._level:
            self.fault(
                f"{self._tied} of {self.compared} answers differ at a near-tie; "
                f"rounding does that with p = {p_value:.1g}"
            )

    def _count_unexplained(self) -> None:
        number = len(self._unexplained)
        if not number:
            return
        if binomial_tail(number, self.compared, UNEXPLAINED) < self._level:
            self.faults += self._unexplained
        else:
            self.missing(
                f"{number} answers differ, and without log-probabilities a near-tie cannot be told from a fault"
            )

    def _status(self) -> Status:
        if self.faults:
            return Status.FAULT
        return Status.OK if self.compared and not self._unexplained else Status.NOT_SHOWN

    def _detail(self) -> str:
        parts = [self.faults[0].message] if self.faults else []
        if self.compared:
            parts.append(f"{self.compared} compared")
        if self._tied:
            parts.append(f"{self._tied} differ at a near-tie")
        missing = [f"not shown: {reason}" for reason in self._missing]
        return "; ".join([*parts, *self.notes, *missing]) or "nothing was compared"


def _difference(tested: Exchange, reference: Exchange, steps: Iterable[Exchange]) -> Fault:
    expected, got = reference.answer.content, tested.answer.content
    place = common_bytes(expected, got)
    shown = [text.encode()[place:].decode(errors="replace")[:SHOWN_CHARS] for text in (got, expected)]
    message = f"after {place} bytes {shown[0]!r} instead of {shown[1]!r}"
    return Fault(message, tuple(item.curl for item in (*steps, reference, tested)), expected, got)


async def _gap(tested: Exchange, reference: Exchange) -> float | None:
    """The gap where the answers part, by the log-probabilities of either request; None: there are none.

    The reference is asked first. A way that is not among the alternatives of either is infinitely far.
    """
    known = False
    for asked in (reference, tested):
        probe = asked.answer if asked.answer.tokens else await _probe(asked)
        if probe is not None:
            place = parting(tested.answer, reference.answer, probe)
            known = known or place.is_known
            if place.gap is not None:
                return place.gap
    return float("inf") if known else None


async def _probe(exchange: Exchange) -> Answer | None:
    """The same request with log-probabilities; None where the server does not give any."""
    try:
        answer = await exchange.client.ask(exchange.query.changed(stream=False).with_logprobs())
    except (RequestRefused, RequestFailed):
        return None
    return answer if answer.tokens else None
