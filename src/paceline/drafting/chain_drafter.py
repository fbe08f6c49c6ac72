"""The best path of another drafter's trees, for targets that verify chains only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from paceline.core.draft_tree import ROOT, DraftTree, chain
from paceline.core.draft_value import DraftValue
from paceline.core.protocols import Drafter, HeadUpdate, Runner
from paceline.core.sequence import Sequence
from paceline.core.types import Capability, RowOutput, StepResult


class ChainDrafter(Drafter):
    """Cuts every tree to one path. What a drafter learns from branches and probes is lost, nothing else changes."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.needs = drafter.needs - {Capability.TREE}
        self.draft_runner = drafter.draft_runner

    def use_value(self, value: DraftValue, source: str = "") -> None:
        self.drafter.use_value(value, source)

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        self.drafter.begin(seq, prompt)

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        return [first_path(tree) for tree in self.drafter.propose(seqs, num_draft_tokens)]

    def look_up(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree] | None:
        trees = self.drafter.look_up(seqs, num_draft_tokens)
        return None if trees is None else list(map(first_path, trees))

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        self.drafter.observe(seqs, results)

    def end(self, seq: Sequence) -> None:
        self.drafter.end(seq)

    def head_update(self, folder: str) -> HeadUpdate | None:
        return self.drafter.head_update(folder)

    def with_runner(self, wrap: Callable[[Runner], Runner]) -> Drafter:
        return ChainDrafter(self.drafter.with_runner(wrap))


def first_path(tree: DraftTree) -> DraftTree:
    """The path through the first child of every node: the likeliest, and the first one drawn where they were drawn.

    Its distributions stay what the tokens were drawn from, because nothing was drawn before them.
    """
    if tree.is_chain and not tree.probes:
        return tree
    nodes: list[int] = []
    parent = ROOT
    for node in range(tree.num_draft_tokens):
        if tree.parents[node] == parent:
            nodes.append(node)
            parent = node
    confidence = None if tree.confidence is None else [tree.confidence[node] for node in nodes]
    path = chain(tree.tokens[nodes], None if tree.probs is None else tree.probs[nodes], confidence)
    return replace(path, source=tree.source) if tree.source else path
