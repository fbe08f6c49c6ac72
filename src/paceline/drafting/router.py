"""Every sequence names its own method: one server, many ways to draft token, in one batch.

A sequence's `method` decides; a sequence that brings a prediction and names no method is drafted by it; all others take the
default. Each drafter sees only its own sequences.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Drafter
from paceline.core.sequence import Sequence
from paceline.core.types import Capability, RowOutput, StepResult
from paceline.errors import OptionError

PREDICTION = "prediction"


class DrafterRouter(Drafter):
    """Passes each sequence on to the drafter it names."""

    def __init__(self, drafters: Mapping[str, Drafter], default: str) -> None:
        if default not in drafters:
            raise OptionError(f"the default method {default!r} is not among {', '.join(drafters)}")
        self.drafters = dict(drafters)
        self.default = default
        self.needs: frozenset[Capability] = frozenset().union(*(drafter.needs for drafter in drafters.values()))

    def method_of(self, seq: Sequence) -> str:
        """The method that drafts for a sequence. Raises OptionError if it names one that is not offered."""
        if seq.params.method is None:
            return PREDICTION if seq.params.prediction and PREDICTION in self.drafters else self.default
        if seq.params.method not in self.drafters:
            raise OptionError(f"method {seq.params.method!r} is not offered here; there is {', '.join(self.drafters)}")
        return seq.params.method

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        self.drafters[self.method_of(seq)].begin(seq, prompt)

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        found = [draft_tree.empty()] * len(seqs)
        for method, places in self._by_method(seqs).items():
            mine = [seqs[place] for place in places]
            trees = self.drafters[method].propose(mine, [num_draft_tokens[place] for place in places])
            for place, from_draft in zip(places, trees):
                found[place] = from_draft
        return found

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        for method, places in self._by_method(seqs).items():
            self.drafters[method].observe([seqs[place] for place in places], [results[place] for place in places])

    def end(self, seq: Sequence) -> None:
        if seq.params.method is None or seq.params.method in self.drafters:  # else it was refused, and never began
            self.drafters[self.method_of(seq)].end(seq)

    def _by_method(self, seqs: list[Sequence]) -> dict[str, list[int]]:
        """The places of the sequences of each method."""
        found: dict[str, list[int]] = {}
        for place, seq in enumerate(seqs):
            found.setdefault(self.method_of(seq), []).append(place)
        return found
