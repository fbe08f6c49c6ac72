"""Every text names its own method: one server, many ways to guess, in one batch.

A text's `method` decides; a text that brings a prediction and names no method is drafted by it; all others take the
default. Each drafter sees only its own texts.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core import tree
from paceline.core.protocols import Ability, Drafter, Output, Round
from paceline.core.sequence import Sequence
from paceline.core.tree import DraftTree
from paceline.errors import OptionError

PREDICTION = "prediction"


class ByText:
    """Passes each text on to the drafter it names."""

    def __init__(self, drafters: Mapping[str, Drafter], default: str) -> None:
        if default not in drafters:
            raise OptionError(f"the default method {default!r} is not among {', '.join(drafters)}")
        self.drafters = dict(drafters)
        self.default = default
        self.needs: frozenset[Ability] = frozenset().union(*(drafter.needs for drafter in drafters.values()))

    def method_of(self, text: Sequence) -> str:
        """The method that drafts for a text. Raises OptionError if it names one that is not offered."""
        if text.method is None:
            return PREDICTION if text.prediction and PREDICTION in self.drafters else self.default
        if text.method not in self.drafters:
            raise OptionError(f"method {text.method!r} is not offered here; there is {', '.join(self.drafters)}")
        return text.method

    def begin(self, text: Sequence, prompt: Output | None) -> None:
        self.drafters[self.method_of(text)].begin(text, prompt)

    def propose(self, texts: list[Sequence], budgets: list[int]) -> list[DraftTree]:
        found = [tree.empty()] * len(texts)
        for method, places in self._by_method(texts).items():
            mine = [texts[place] for place in places]
            trees = self.drafters[method].propose(mine, [budgets[place] for place in places])
            for place, guessed in zip(places, trees):
                found[place] = guessed
        return found

    def observe(self, texts: list[Sequence], rounds: list[Round]) -> None:
        for method, places in self._by_method(texts).items():
            self.drafters[method].observe([texts[place] for place in places], [rounds[place] for place in places])

    def end(self, text: Sequence) -> None:
        if text.method is None or text.method in self.drafters:  # else it was refused, and never began
            self.drafters[self.method_of(text)].end(text)

    def _by_method(self, texts: list[Sequence]) -> dict[str, list[int]]:
        """The places of the texts of each method."""
        found: dict[str, list[int]] = {}
        for place, text in enumerate(texts):
            found.setdefault(self.method_of(text), []).append(place)
        return found
