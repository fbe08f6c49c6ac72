"""Trees cut to chains, for targets that verify chains only."""

from __future__ import annotations

import pytest
import torch

from paceline.build import check_capabilities, fitted
from paceline.core.draft_tree import DraftTree, chain
from paceline.core.types import Capability
from paceline.drafting.chain_drafter import ChainDrafter, first_path
from paceline.drafting.lookahead import Lookahead
from paceline.drafting.suffix import Suffix
from paceline.errors import CapabilityError
from paceline.runners.table import TableRunner


def test_the_first_child_of_every_node_is_followed() -> None:
    tree = DraftTree(torch.tensor([1, 2, 3, 4, 5, 6]), [-1, -1, 0, 1, 0, 2])
    path = first_path(tree)
    assert path.tokens.tolist() == [1, 3, 6] and path.is_chain


def test_tokens_keep_the_distributions_they_were_drawn_from() -> None:
    probs = torch.eye(4)
    tree = DraftTree(torch.tensor([0, 1, 2, 3]), [-1, -1, 0, 1], probs)
    path = first_path(tree)
    assert path.tokens.tolist() == [0, 2] and path.probs is not None and torch.equal(path.probs, probs[[0, 2]])


def test_nodes_that_cannot_be_accepted_are_left_out() -> None:
    tree = DraftTree(torch.tensor([1, 2, 8, 9]), [-1, 0, -1, 2], probes=2)
    assert first_path(tree).tokens.tolist() == [1, 2] and first_path(tree).probes == 0


def test_a_chain_stays_as_it_is() -> None:
    tree = chain([1, 2, 3])
    assert first_path(tree) is tree


@pytest.mark.parametrize("make", [Suffix, Lookahead])
def test_a_drafter_of_trees_fits_a_target_of_chains(make: type[Suffix] | type[Lookahead]) -> None:
    target = TableRunner(vocab_size=20, order=1, seed=0)
    assert isinstance(fitted(target, make()), make)
    target.capabilities -= {Capability.TREE}
    with pytest.raises(CapabilityError):
        check_capabilities(target, make())
    assert isinstance(fitted(target, make()), ChainDrafter)
