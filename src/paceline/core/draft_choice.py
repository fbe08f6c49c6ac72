"""What a draft-length policy knows of sequences, and chooses for them."""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import ClassVar

from paceline.core.acceptance import PositionRates


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """Draft tokens that a policy gives to a sequence at most.

    rows  of a pass that are rounded alike; a batch has no more, each sequence as many as the others
    """

    max_draft_tokens: int
    rows: int | None = None

    def of_each(self, num_seqs: int) -> int:
        """Passes are captured for some sizes only, powers of two among them."""
        if self.rows is None:
            return self.max_draft_tokens
        return min(self.max_draft_tokens, max(1, self.rows // (1 << (num_seqs - 1).bit_length())) - 1)


@dataclass(slots=True)
class DraftedSequence:
    """What the policy knows of one sequence."""

    rates: PositionRates
    kind: str  # how it is drafted for; see `kind_of`
    num_read: int  # tokens that the drafter had read when it last drafted, or when the sequence began
    num_draft_tokens: int = 0  # in this step
    num_unread: int = 0  # tokens that the drafter had to read first in this step


@dataclass(frozen=True, slots=True)
class Choice:
    """A k for each sequence, the tokens that a step then promises, and its seconds."""

    ks: list[int]
    tokens: float = 0.0
    seconds: float = 1.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass(slots=True)
class KeptChoice:
    """The best choice of an earlier plan, which stands while no draft token is verified: only costs change a little."""

    choice: Choice
    states: list[DraftedSequence]
    limits: list[int]
    uses: int = 0

    MAX_USES: ClassVar[int] = 8

    def take(self, states: list[DraftedSequence], limits: list[int]) -> Choice | None:
        """None: it was made for others, or too many steps ago."""
        self.uses += 1
        same = len(states) == len(self.states) and all(map(is_, states, self.states)) and limits == self.limits
        return self.choice if same and self.uses <= self.MAX_USES else None


@dataclass(frozen=True, slots=True)
class Gain:
    """Tokens that one more draft token promises to a sequence."""

    tokens: float
    index: int


@dataclass(frozen=True, slots=True)
class DraftCandidates:
    """The sequences whose k the policy may choose, by their index in the batch."""

    indices: list[int]
    limits: list[int]  # of every sequence of the batch
    num_unread: dict[int, int]  # tokens that the drafter has not read
    plain: float  # seconds of a plain step

    @property
    def count(self) -> int:
        return len(self.indices)
