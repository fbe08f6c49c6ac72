"""No draft tokens: plain decoding, through the same code as every other method."""

from __future__ import annotations

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Drafter
from paceline.core.sequence import Sequence
from paceline.drafting.registry import DrafterContext, DrafterSpec, WeightsNeeded


class NoDraft(Drafter):
    """Proposes nothing."""

    looks_up = True

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        return [draft_tree.empty() for _ in seqs]


def build(context: DrafterContext) -> NoDraft:
    return NoDraft()


SPEC = DrafterSpec(
    name="none",
    summary="plain decoding, one token per target pass",
    weights=WeightsNeeded.NONE,
    build=build,
    takes_draft_model=False,
)
