"""One drafter per sequence: requests of one batch may use different methods.

The `method` of a sequence decides; a sequence that has a prediction and names no method is drafted by it; all others
use the default. Each drafter sees only its own sequences.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.draft_value import PREDICTION, DraftValue
from paceline.core.looped_steps import LoopedSteps
from paceline.core.protocols import Drafter, HeadUpdate, Preparation, Runner
from paceline.core.sequence import Sequence
from paceline.core.types import RowOutput, StepResult, WarmupPlan
from paceline.errors import OptionError

__all__ = ["PREDICTION", "DrafterRouter"]


class DrafterRouter(Drafter):
    """Passes each sequence to the drafter of its method."""

    def __init__(self, drafters: Mapping[str, Drafter], default: str) -> None:
        if default not in drafters:
            raise OptionError(f"the default method {default!r} is not among {', '.join(drafters)}")
        self.drafters = dict(drafters)
        self.default = default
        self.needs = frozenset().union(*(drafter.needs for drafter in drafters.values()))
        self.draft_runner = self.drafters[default].draft_runner

    def method_of(self, seq: Sequence) -> str:
        """The method that drafts for a sequence. Raises OptionError if it names one that is not offered."""
        if seq.params.method is None:
            return PREDICTION if seq.params.prediction and PREDICTION in self.drafters else self.default
        if seq.params.method not in self.drafters:
            raise OptionError(f"method {seq.params.method!r} is not offered here; there is {', '.join(self.drafters)}")
        return seq.params.method

    def preparations(self, plan: WarmupPlan) -> list[Preparation]:
        return [piece for drafter in self.drafters.values() for piece in drafter.preparations(plan)]

    def rehearsed(self) -> list[Drafter]:
        """Made-up sequences name no method, so the default drafts for them."""
        return [self, *self.drafters[self.default].rehearsed()[1:]]

    def use_value(self, value: DraftValue, source: str = "") -> None:
        for drafter in self.drafters.values():
            drafter.use_value(value, source)

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        self.drafters[self.method_of(seq)].begin(seq, prompt)

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        trees = [draft_tree.empty()] * len(seqs)
        for method, indices in self._by_method(seqs).items():
            group = [seqs[index] for index in indices]
            drafts = self.drafters[method].propose(group, [num_draft_tokens[index] for index in indices])
            for index, tree in zip(indices, drafts):
                trees[index] = tree
        return trees

    def look_up(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree] | None:
        """Where all methods of these sequences do."""
        trees = [draft_tree.empty()] * len(seqs)
        for method, indices in self._by_method(seqs).items():
            group = [seqs[index] for index in indices]
            found = self.drafters[method].look_up(group, [num_draft_tokens[index] for index in indices])
            if found is None:
                return None
            for index, tree in zip(indices, found):
                trees[index] = tree
        return trees

    def draft_loop(
        self, target: Runner, seqs: list[Sequence], num_draft_tokens: list[int], num_steps: int
    ) -> LoopedSteps | None:
        """Where all sequences are of one method."""
        methods = {self.method_of(seq) for seq in seqs}
        if len(methods) != 1:
            return None
        return self.drafters[methods.pop()].draft_loop(target, seqs, num_draft_tokens, num_steps)

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        for method, indices in self._by_method(seqs).items():
            self.drafters[method].observe([seqs[index] for index in indices], [results[index] for index in indices])

    def end(self, seq: Sequence) -> None:
        if seq.params.method is None or seq.params.method in self.drafters:  # else it was refused and never began
            self.drafters[self.method_of(seq)].end(seq)

    def head_update(self, folder: str) -> HeadUpdate | None:
        """The head of the default method; requests cannot choose another head."""
        return self.drafters[self.default].head_update(folder)

    def _by_method(self, seqs: list[Sequence]) -> dict[str, list[int]]:
        """The indices of the sequences of each method."""
        indices: dict[str, list[int]] = {}
        for index, seq in enumerate(seqs):
            indices.setdefault(self.method_of(seq), []).append(index)
        return indices
