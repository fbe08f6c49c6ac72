"""The states of a step that a head will read: kept as they are where nothing writes them, and copied elsewhere."""

from __future__ import annotations

import pytest
import torch

from paceline.core.draft_tree import DraftTree, empty
from paceline.core.types import RowOutput, StepResult, VerifyResult
from paceline.drafting.head_contexts import HeadContexts
from paceline.heads.kv_cache import KeyBuffers
from tests.support.build import sequence

PROMPT = [3, 1, 4]


def kept(tree: DraftTree, accepted: list[int], *, alone: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The states of a step, and what is pending of them."""
    contexts = HeadContexts(KeyBuffers(1, 16, torch.zeros(1)), None, "test", ahead=0)
    seq, states = sequence(PROMPT, 50), torch.randn(1 + len(tree), 8)
    contexts.begin(seq, torch.zeros(len(PROMPT) - 1, 8))
    emitted = [7] * (len(accepted) + 1)
    seq.ids += emitted
    result = StepResult(tree, VerifyResult(accepted, 7, emitted[:-1]), RowOutput(states), emitted)
    contexts.extend(seq, result, states, alone=alone)
    state = contexts.of(seq)
    assert state.num_pending == len(PROMPT) - 1 + len(emitted)
    return states, state.pending[-1]


@pytest.mark.parametrize(
    ("tree", "accepted", "rows"),
    [
        (empty(), [], [0]),
        (DraftTree(torch.tensor([5, 6]), [-1, 0]), [0, 1], [0, 1, 2]),
        (DraftTree(torch.tensor([5, 6]), [-1, 0]), [0], [0, 1]),
        (DraftTree(torch.tensor([5, 6, 8]), [-1, -1, 1]), [1, 2], [0, 2, 3]),
    ],
    ids=["plain", "all accepted", "one rejected", "a path"],
)
@pytest.mark.parametrize("alone", [True, False])
def test_the_accepted_rows_are_kept(tree: DraftTree, accepted: list[int], rows: list[int], alone: bool) -> None:
    """Without a copy only where they are all that a pass on the host has returned."""
    states, pending = kept(tree, accepted, alone=alone)
    assert torch.equal(pending, states[rows])
    assert (pending is states) == (alone and len(rows) == len(states))
