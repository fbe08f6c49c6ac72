"""Blocks of many anchors in one pass equal blocks that are drafted one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.heads.dflash import DFlashHead
from paceline.train import anchor_blocks
from paceline.train.anchor_blocks import AnchorBlocks, block_states, possible_anchors, random_order
from paceline.train.corpus import TrainingBatch
from tests.heads.dflash_reference import random_head

LENGTH, BATCH = 24, 3
VARIANTS = {
    "dflash": {},
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4},
    "jetspec": {"causal": True},
    "windows": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 4},
}


def batch_of(head: DFlashHead, number: int = 0) -> TrainingBatch:
    tokens = torch.randint(0, head.config.vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    return TrainingBatch(tokens, torch.tensor([24, 20, 9]), torch.tensor([4, 6, 3]), number)


def one_block(head: DFlashHead, features: Tensor, tokens: Tensor, anchor: int) -> Tensor:
    """What drafting does: the context before the anchor, then the anchor and mask tokens."""
    size = head.config.block_size
    stores = head.context_stores(head.context(features[None, :anchor]), torch.arange(anchor)[None])
    rows = torch.arange(anchor, anchor + size)[None]
    ids = torch.tensor([[int(tokens[anchor]), *[head.config.mask_token_id] * (size - 1)]])
    masks = head.layer_masks(None, rows, torch.arange(anchor + size)[None])
    return head.forward_block(ids, stores, rows, masks)[0]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_blocks_of_one_pass_equal_blocks_drafted_alone(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchor_blocks, "BLOCKS_PER_CHUNK", 4)
    head = random_head(**VARIANTS[variant]).double()
    batch = batch_of(head)
    features = torch.randn(BATCH, LENGTH, head.fc.in_features, dtype=torch.float64)
    blocks = AnchorBlocks.of(random_order(batch), possible_anchors(batch), 9, head.config.block_size)
    assert blocks.anchors.shape[1] == 4 and not blocks.valid.all(), "several chunks, one of them not full"
    states = block_states(head, features, batch.tokens, blocks)
    for chunk, block in blocks.valid.nonzero().tolist():
        seq, anchor = int(blocks.seq[chunk]), int(blocks.anchors[chunk, block])
        alone = one_block(head, features[seq], batch.tokens[seq], anchor)
        assert torch.allclose(states[chunk, block], alone, atol=1e-10)


def test_anchors_are_distinct_tokens_before_an_answer_token_and_follow_the_number_of_the_batch() -> None:
    head = random_head()
    first, again, other = (batch_of(head, number) for number in (7, 7, 8))

    def anchors(batch: TrainingBatch) -> list[tuple[int, int]]:
        blocks = AnchorBlocks.of(random_order(batch), possible_anchors(batch), 6, head.config.block_size)
        pairs = zip(blocks.seq[:, None].expand_as(blocks.anchors)[blocks.valid], blocks.anchors[blocks.valid])
        return [(int(seq), int(anchor)) for seq, anchor in pairs]

    assert anchors(first) == anchors(again) != anchors(other)
    assert len(set(anchors(first))) == len(anchors(first))
    lengths, starts = first.lengths.tolist(), first.starts.tolist()
    assert all(starts[seq] - 1 <= anchor < lengths[seq] - 1 for seq, anchor in anchors(first))


def test_all_possible_anchors_are_taken_where_as_many_are_asked_for() -> None:
    batch = batch_of(random_head())
    blocks = AnchorBlocks.of(random_order(batch), possible_anchors(batch), LENGTH, 4)
    assert int(blocks.valid.sum()) == int(possible_anchors(batch).sum())
