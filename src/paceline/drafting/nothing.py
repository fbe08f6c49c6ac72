"""No guesses: plain decoding, through the same code as everything else."""

from __future__ import annotations

from paceline.core import tree
from paceline.core.protocols import Ability, Output, Round
from paceline.core.sequence import Sequence
from paceline.core.tree import DraftTree


class Nothing:
    """Never guesses."""

    needs: frozenset[Ability] = frozenset()

    def begin(self, text: Sequence, prompt: Output | None) -> None:
        pass

    def propose(self, texts: list[Sequence], budgets: list[int]) -> list[DraftTree]:
        return [tree.empty() for _ in texts]

    def observe(self, texts: list[Sequence], rounds: list[Round]) -> None:
        pass

    def end(self, text: Sequence) -> None:
        pass
