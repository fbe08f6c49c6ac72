"""The path of a candidate selector in one compiled call, against the same path through torch."""

from __future__ import annotations

import pytest
import torch

from paceline.drafting.block_rows import block_rows
from paceline.heads.candidate_selector import CandidateSelector
from paceline.heads.dflash import DFlashHead
from paceline.layers.cpu_kernels import library
from paceline.layers.cpu_selector import MAX_CANDIDATES, CompiledSelector
from tests.heads.dflash_reference import random_head

pytestmark = pytest.mark.skipif(library() is None, reason="no compiled kernels on this machine")


def selecting_head(seed: int, top_k: int) -> DFlashHead:
    """It predicts 37 of the target's 50 tokens, so that ids of both vocabularies differ."""
    head = random_head(seed, selector_rank=7, selector_top_k=top_k, draft_vocab_size=37)
    head.choose_vocabulary(torch.arange(13, 50))
    return head


@pytest.mark.parametrize("top_k", [1, 4, 16, 37])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_path_and_its_confidence_are_those_of_torch(seed: int, top_k: int) -> None:
    head = selecting_head(seed, top_k)
    selector = head.candidate_selector
    assert isinstance(selector, CandidateSelector)
    states = torch.randn(3, 4, head.config.hidden_size, generator=torch.Generator().manual_seed(seed))
    anchors = torch.tensor([5, 49, 0])
    expected = block_rows(head, states, anchors).greedy(with_confidence=True)
    selector.compile_path(head.target_ids)
    assert selector.compiled is not None
    block = block_rows(head, states, anchors).greedy(with_confidence=True)
    assert torch.equal(block.tokens, expected.tokens)
    assert block.confidence is not None and expected.confidence is not None
    torch.testing.assert_close(block.confidence, expected.confidence, rtol=1e-4, atol=1e-5)
    assert block_rows(head, states, anchors).greedy().confidence is None


def test_codebooks_that_change_in_place_change_the_path() -> None:
    head = selecting_head(0, 16)
    selector = head.candidate_selector
    assert isinstance(selector, CandidateSelector)
    selector.compile_path(head.target_ids)
    states, anchors = torch.randn(1, 4, head.config.hidden_size), torch.tensor([5])
    selector.successor_codebook.data.normal_(std=30.0)
    changed = block_rows(head, states, anchors).greedy().tokens
    selector.compiled = None
    assert torch.equal(changed, block_rows(head, states, anchors).greedy().tokens)


def test_a_selector_that_the_kernels_lack_stays_with_torch_and_an_unknown_anchor_is_refused() -> None:
    book, ids = torch.randn(50, 8), torch.arange(50)
    assert CompiledSelector.of(book.bfloat16(), book, ids, 4) is None
    assert CompiledSelector.of(book, book, ids, MAX_CANDIDATES + 1) is None
    compiled = CompiledSelector.of(book, book, ids, 4)
    assert compiled is not None
    with pytest.raises(IndexError, match="no token 50"):
        compiled.path(torch.randn(2, 50), torch.randn(2, 8), 50)
