"""DraftTree: chains, merged paths, ancestors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.draft_tree import DraftTree, ancestors, chain, depths, empty, merge, path_to, with_source
from paceline.errors import OptionError

PARENTS = st.integers(0, 12).flatmap(lambda count: st.tuples(*[st.integers(-1, node - 1) for node in range(count)]))


def test_a_chain_is_a_tree() -> None:
    tree = chain([5, 6, 7])
    assert (tree.parents, tree.is_chain, tree.num_draft_tokens, len(tree)) == ([-1, 0, 1], True, 3, 3)
    assert len(empty()) == 0 and empty().is_chain


def test_lists_are_taken_too() -> None:
    tree = DraftTree([1, 2], (-1, 0))  # type: ignore[arg-type]
    assert tree.tokens.dtype == torch.int64 and tree.parents == [-1, 0]


@pytest.mark.parametrize(("tokens", "parents"), [([1, 2], [-1]), ([1, 2], [0, -1]), ([1], [-2]), ([1, 2], [-1, 1])])
def test_impossible_trees_are_refused(tokens: list[int], parents: list[int]) -> None:
    with pytest.raises(OptionError):
        DraftTree(torch.tensor(tokens), parents)


def test_a_distribution_a_node_is_required() -> None:
    with pytest.raises(OptionError, match="distribution"):
        DraftTree(torch.tensor([1, 2]), [-1, 0], torch.ones(1, 3))


def test_merge_stores_a_shared_beginning_once() -> None:
    tree = merge([[1, 2, 3], [1, 2, 4], [5]], limit=10)
    assert tree.tokens.tolist() == [1, 2, 3, 4, 5]
    assert tree.parents == [-1, 0, 1, 1, -1]
    assert not tree.is_chain


def test_merge_cuts_later_paths_first() -> None:
    assert merge([[1, 2, 3], [4, 5]], limit=3).tokens.tolist() == [1, 2, 3]
    assert len(merge([[1, 2, 3]], limit=0)) == 0


def test_probes_are_not_draft_tokens() -> None:
    tree = DraftTree(torch.tensor([1, 2, 3]), [-1, 0, -1], None, probes=1)
    assert (tree.num_draft_tokens, tree.is_chain) == (2, True)


@pytest.mark.slow
@given(PARENTS)
def test_ancestors_are_the_nodes_of_the_path(parents: tuple[int, ...]) -> None:
    mask = ancestors(parents)
    for node in range(len(parents)):
        path = path_to(parents, node)
        assert mask[node].nonzero().flatten().tolist() == sorted(path)
        assert len(path) == depths(parents)[node] + 1


def test_a_tree_under_the_name_of_its_drafter_is_the_same_tree() -> None:
    tree = chain([5, 6], confidence=[0.5, 0.25])
    named = with_source(tree, "suffix")
    assert (named.source, tree.source) == ("suffix", "") and named.tokens is tree.tokens
    assert (named.parents, named.confidence, named.probs, named.probes) == ([-1, 0], [0.5, 0.25], None, 0)
