"""No draft tokens: plain decoding, through the same code as everything else."""

from __future__ import annotations

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Drafter
from paceline.core.sequence import Sequence
from paceline.core.types import Capability, RowOutput, StepResult


class NoDraft(Drafter):
    """Never draft tokens."""

    needs: frozenset[Capability] = frozenset()

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        pass

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        return [draft_tree.empty() for _ in seqs]

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        pass

    def end(self, seq: Sequence) -> None:
        pass
