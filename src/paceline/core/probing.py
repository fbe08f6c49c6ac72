"""When to draft although it does not seem to pay.

Estimates go out of date: input turns predictable, machines get quicker, a measurement was wrong. A probe is a step that
drafts to find out. What probes lose against plain decoding stays within a small share of the time, and no rest between
two probes is endless, whatever the estimates are.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.008  # of all time, that probes may lose
FIRST_PROBES = 2.0  # plain steps' worth of time that they may lose at the very start …
FIRST_READING = 16.0  # … and at most this many to read the first prompt: 300 tokens by a draft of a third, on a CPU
FIRST_REST, LONGEST_REST = 16, 256  # plain steps between two probes: doubled by each one that did not pay
AFFORDABLE = 3.0  # plain steps that a drafter may read for a probe; one that must read more comes later in proportion
MAX_FACTOR = 8.0  # but never later than this many longest rests
PROBE_STEPS = 3  # of a probe where steps are taken in a row: the first waits for what was queued before it
MAX_DEBT = 4.0  # plain steps: one bad measurement must not silence probes for long


@dataclass(slots=True)
class ProbeSchedule:
    """What probes may still lose, and when the next one runs whatever it loses.

    balance  seconds: filled by a share of all time and by what drafts win, emptied by what probes lose
    rested   plain steps since the last draft
    rest     plain steps after which a probe runs in any case
    probing  whether the last step was a probe
    cost     what the next probe is expected to lose, seconds
    reading  of that, what the drafter needs to read first
    share    of all time, that probes may lose
    """

    balance: float = 0.0
    opened: bool = False
    rested: int = 0
    rest: int = FIRST_REST
    probing: bool = False
    cost: float = 0.0
    reading: float = 0.0
    share: float = SHARE

    def open(self, plain: float, first_reading: float) -> None:
        """Before the first plan: the drafter must once read a prompt, or nothing is ever known of it."""
        if not self.opened:
            self.opened = True
            self.balance = FIRST_PROBES * plain + min(first_reading, FIRST_READING * plain)

    def is_due(self, cost: float, plain: float, *, sure: bool = True) -> bool:
        """Whether a probe that is expected to lose `cost` runs now. A probe that is under way goes on while it can.

        sure: more than one measurement stands behind that cost; else it delays nothing.
        """
        if self.balance > 0 and (self.probing or self.balance >= cost):
            return True
        return self.rested >= (self._longest_rest(cost, plain) if sure else FIRST_REST)

    def _longest_rest(self, cost: float, plain: float) -> float:
        if plain <= 0:
            return self.rest
        factor = min(max(1.0, self.reading / (AFFORDABLE * plain)), MAX_FACTOR)
        return min(max(self.rest, cost / (self.share * plain)), LONGEST_REST * factor)

    def passed(self, seconds: float, plain: float, steps: int = 1) -> None:
        """Plain steps were taken, of so many seconds each."""
        self.rested += steps
        self.probing = False
        self._add(self.share * seconds * steps, plain)

    def drafted(self, won: float, plain: float, *, probe: bool) -> None:
        """A step drafted and won this many seconds against plain decoding. Only what probes lose is charged."""
        if probe and self.rested:
            self.rest = min(2 * self.rest, LONGEST_REST)
        self.rest = self.rest if probe else FIRST_REST
        self.rested, self.probing = 0, probe
        self._add(won if probe else max(0.0, won), plain)

    def charge(self, seconds: float, plain: float) -> None:
        """What a probe that is over has cost beside its steps."""
        self._add(-seconds, plain)

    def _add(self, seconds: float, plain: float) -> None:
        most = max(FIRST_PROBES * plain, 1.5 * self.cost)
        self.balance = max(min(self.balance + seconds, max(most, self.balance)), -MAX_DEBT * plain)
