"""What is known of the drafts of one source: how often they are accepted, and what they bring and take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from paceline.core.acceptance import PositionRates
from paceline.core.confidence import ConfidenceTable
from paceline.core.cost_model import CostCurve, HiccupFilter, draft_curve
from paceline.core.depth_gains import DepthGains
from paceline.core.draft_tree import ROOT, DraftTree

Kept = TypeVar("Kept")
DEPTH_WEIGHT = 0.3  # of one draft in how deep nodes reach: high, since a drafter makes trees or it does not
LEAST_CHAIN_SHARE = 0.9  # depths a draft token adds at least where drafts are chains, some of them with a leaf
DRAFT_WEIGHT = 0.06  # of one draft in what drafts bring and cost
STALE = 64  # steps without a draft after which what is known counts half: another sequence has begun


@dataclass(slots=True)
class DraftStats:
    """What a draft brought and took lately: tokens that are accepted, seconds of making and verifying them."""

    tokens: float = 0.0
    cost: float = 0.0
    num_drafts: int = 0
    last_step: int = 0

    def add(self, tokens: float, cost: float, step: int = 0) -> None:
        """One more draft, and what is to be expected of it. The first few count alike, later ones fade; the longer
        there was none, the more the next one counts. step: its number, where steps are counted."""
        if self.num_drafts == 1 and HiccupFilter.OUTLIER * cost < self.cost:
            self.num_drafts = 0  # the very first one was held up
        self.num_drafts += 1
        idle_steps, self.last_step = max(0, step - self.last_step - 1), step
        weight = max(DRAFT_WEIGHT, 1.0 / self.num_drafts, idle_steps / (idle_steps + STALE))
        self.tokens += weight * (tokens - self.tokens)
        self.cost += weight * (cost - self.cost)


class ByBatchSize(Generic[Kept]):
    """What is known for each size of batch: a draft costs a sequence less among others, and its tokens save less there.

    Sizes up to the next power of two are taken to be alike.
    """

    def __init__(self, make: Callable[[], Kept]) -> None:
        self._make = make
        self._kept: dict[int, Kept] = {}

    def of(self, num_seqs: int) -> Kept:
        size = (num_seqs - 1).bit_length()
        if size not in self._kept:
            self._kept[size] = self._make()
        return self._kept[size]


def new_stats() -> ByBatchSize[DraftStats]:
    return ByBatchSize(DraftStats)


@dataclass(slots=True)
class SourceRecord:
    """What is known of the drafts of one source.

    table  acceptance by confidence, of drafts that state one
    leaf_table  the same of second choices, which are right less often than first ones as sure as they
    rates  acceptance by depth, of the others
    drafts  seconds of making a draft, by its draft tokens: a sequence's share of them in a batch
    stats  what they brought and took
    states_confidence  its drafts do
    depths  what its draft tokens win, by depth
    stops_itself  the device makes no draft token that is not worth it
    depth_share  depths that a draft token adds: 1 for a chain, less for a tree
    """

    table: ConfidenceTable = field(default_factory=ConfidenceTable)
    leaf_table: ConfidenceTable = field(default_factory=ConfidenceTable)
    rates: PositionRates = field(default_factory=lambda: PositionRates(fade=0.98, weight=3.0))
    drafts: ByBatchSize[CostCurve] = field(default_factory=lambda: ByBatchSize(draft_curve))
    stats: ByBatchSize[DraftStats] = field(default_factory=new_stats)
    states_confidence: bool = False
    depths: DepthGains = field(default_factory=DepthGains)
    stops_itself: bool = False
    depth_share: float = 1.0

    def table_of(self, tree: DraftTree, node: int) -> ConfidenceTable:
        return self.table if node < len(tree) - tree.leaves else self.leaf_table

    @property
    def makes_trees(self) -> bool:
        return self.depth_share < LEAST_CHAIN_SHARE

    def reached(self, num_draft_tokens: int, reach: int) -> None:
        """A draft of so many draft tokens was so deep."""
        self.depth_share += DEPTH_WEIGHT * (reach / num_draft_tokens - self.depth_share)

    @property
    def draft(self) -> CostCurve:
        """Of a sequence alone."""
        return self.drafts.of(1)

    def compare(self, tree: DraftTree, tokens: list[int]) -> None:
        """Which nodes of a draft the target has confirmed, on the path of these tokens. A chosen token is accepted as
        often as the target draws it itself: one that was not sent teaches as well. Nothing is learnt of a draft that
        states no confidence, or that was drawn."""
        if tree.confidence is None or tree.probs is not None:
            return
        drafted, node = tree.tokens.tolist(), ROOT
        for token in tokens:
            children = [child for child, parent in enumerate(tree.parents) if parent == node]
            if not children:
                return
            for child in children:
                self.table_of(tree, child).observe(tree.confidence[child], drafted[child] == token)
            node = next((child for child in children if drafted[child] == token), len(drafted))


def seconds_each(drafts: CostCurve) -> float:
    """Of one more draft token, over all numbers of them that were made; of one, before there were others."""
    longest = drafts.largest
    return (drafts.at(longest) - drafts.at(1)) / (longest - 1) if longest > 1 else drafts.at(1) if longest else 0.0
