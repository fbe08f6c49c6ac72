"""paceline's own marks in a stream: which tokens are accepted draft tokens, and where a step ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.core.draft_tree import chain
from paceline.core.stats import SpecStats


@dataclass(frozen=True, slots=True)
class StepMark:
    """What `x_paceline` says of one part of an answer."""

    from_draft: bool = False
    num_drafted: int | None = None


@dataclass(slots=True)
class StepMarks:
    """Counts steps from their marks. seen: the server sends them."""

    seen: bool = False
    draft_lengths: dict[int, int] = field(default_factory=dict)
    _counted: SpecStats = field(default_factory=SpecStats)
    _totals: dict[str, Any] = field(default_factory=dict)
    _emitted: int = 0  # in the step under way
    _accepted: int = 0

    def read(self, marks: Any) -> StepMark:
        """The marks of one part; those of the last part hold the totals of the answer."""
        if not isinstance(marks, dict):
            return StepMark()
        self.seen = True
        if "new_tokens" in marks:
            self._totals = marks
            return StepMark()
        number, from_draft, drafted = int(marks["num_tokens"]), bool(marks["from_draft"]), marks["num_draft_tokens"]
        self._emitted += number
        self._accepted += number if from_draft else 0
        if drafted is not None:
            self._close_step(int(drafted))
        return StepMark(from_draft, drafted)

    def stats(self, new_tokens: int) -> SpecStats:
        """The server's totals, with the positions that were counted here."""
        stats = self._counted
        for name in ("steps", "drafted", "accepted"):
            setattr(stats, name, int(self._totals.get(name, getattr(stats, name))))
        stats.new_tokens = int(self._totals.get("new_tokens", new_tokens))
        return stats

    def _close_step(self, drafted: int) -> None:
        if drafted:
            cut = self._emitted <= self._accepted
            self._counted.add_step(chain([0] * drafted), self._accepted, self._emitted, cut)
        else:
            self._counted.add_plain(self._emitted)
        steps = 1 if drafted else self._emitted
        self.draft_lengths[drafted] = self.draft_lengths.get(drafted, 0) + steps
        self._emitted = self._accepted = 0
