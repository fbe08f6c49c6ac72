"""What a comparison may conclude: lossless, different, or not shown; and how much evidence `lossless` takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

CERTAINTY = 0.95  # with which the required difference would be found
DISTANCE = 0.2  # the largest difference that may go unnoticed where the output is called lossless
MIN_DRAWS = 200  # fewer draws never show that an output is lossless


class Outcome(Enum):
    """`not shown` is no soft pass: the evidence is too thin to say either of the others."""

    LOSSLESS = "lossless"
    DIFFERENT = "different"
    NOT_SHOWN = "not shown"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What sampled outputs need before they are called lossless.

    distance  a difference of this size (total variation) must be found with probability CERTAINTY
    """

    distance: float = DISTANCE
    min_draws: int = MIN_DRAWS

    def missing(self, draws: int, detectable: float) -> str | None:
        """What is missing, in words; None where the evidence is enough."""
        if draws < self.min_draws:
            return f"{draws} draws, at least {self.min_draws} are needed"
        if detectable > self.distance:
            return f"{draws} draws find a distance of {detectable:.2f}, {self.distance:g} is needed"
        return None


def weakest(outcomes: Iterable[Outcome]) -> Outcome:
    """One difference decides; otherwise everything must be lossless, and nothing at all shows nothing."""
    present = set(outcomes)
    if Outcome.DIFFERENT in present:
        return Outcome.DIFFERENT
    return Outcome.LOSSLESS if present == {Outcome.LOSSLESS} else Outcome.NOT_SHOWN


def strongest(outcomes: Iterable[Outcome]) -> Outcome:
    """For several tries at one question: a difference decides, and otherwise one proof is enough."""
    present = set(outcomes)
    for outcome in (Outcome.DIFFERENT, Outcome.LOSSLESS):
        if outcome in present:
            return outcome
    return Outcome.NOT_SHOWN
