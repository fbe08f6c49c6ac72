"""Blocks of many anchors of a batch, so that one pass of a block drafter trains on all of them.

An anchor is a token whose next tokens a block drafts. Blocks of one sequence are packed into chunks: a chunk is one row
of the pass. Its keys are the context of its sequence and its own blocks; the mask shows a block the context before its
anchor and itself. Smaller chunks waste less on blocks that do not see each other, larger ones copy the context less.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.heads.attention import KeyValues
from paceline.heads.dflash import DFlashHead
from paceline.train.corpus import TrainingBatch

BLOCKS_PER_CHUNK = 32


@dataclass(frozen=True, slots=True, eq=False)
class AnchorBlocks:
    """Chunks of blocks.

    seq      int64 [chunks]: the row of the batch a chunk belongs to
    anchors  int64 [chunks, blocks]: positions
    valid    bool [chunks, blocks]: the others only fill a chunk up
    """

    seq: Tensor
    anchors: Tensor
    valid: Tensor
    block_size: int

    @classmethod
    def of(cls, order: Tensor, selected: Tensor, count: int, block_size: int) -> AnchorBlocks:
        """At most `count` selected positions of each sequence, those with the highest order.

        order, selected: [batch, length]
        """
        length = order.shape[1]
        size = min(BLOCKS_PER_CHUNK, length)
        count = min(-(-count // size) * size, length // size * size)
        best = order.masked_fill(~selected, -torch.inf).topk(count, dim=-1)
        anchors, valid = best.indices.unflatten(1, (-1, size)), best.values.isfinite().unflatten(1, (-1, size))
        seq, chunk = valid.any(dim=-1).nonzero(as_tuple=True)
        return cls(seq, anchors[seq, chunk], valid[seq, chunk], block_size)

    @property
    def positions(self) -> Tensor:
        """int64 [chunks, blocks, block_size]"""
        return self.anchors[..., None] + torch.arange(self.block_size, device=self.anchors.device)

    def ids(self, tokens: Tensor, mask_token_id: int) -> Tensor:
        """int64 [chunks, blocks, block_size]: of each block the anchor, then mask tokens."""
        ids = torch.full_like(self.positions, mask_token_id)
        ids[..., 0] = tokens[self.seq[:, None], self.anchors]
        return ids

    def at(self, values: Tensor) -> Tensor:
        """values [batch, length, …] at every row, clamped at the end: [chunks, blocks, block_size, …]"""
        return values[self.seq[:, None, None], self.positions.clamp(max=values.shape[1] - 1)]

    def inside(self, lengths: Tensor) -> Tensor:
        """bool [chunks, blocks, block_size]: the row's token exists."""
        return self.positions < lengths[self.seq][:, None, None]

    def mask(self, length: int) -> Tensor:
        """bool [chunks, 1, rows, length + rows]"""
        chunks, blocks = self.anchors.shape
        columns = torch.arange(length, device=self.anchors.device)
        context = (columns < self.anchors[..., None]).repeat_interleave(self.block_size, dim=1)
        block = torch.arange(blocks, device=columns.device).repeat_interleave(self.block_size)
        own = (block[:, None] == block[None]).expand(chunks, -1, -1)
        return torch.cat([context, own], dim=-1)[:, None]


class _ChunkStore:
    """Keys of each chunk's sequence before those of the chunk: a KeyStore that keeps gradients."""

    def __init__(self, context: KeyValues, seq: Tensor) -> None:
        self._context, self._seq = context, seq

    def part(self, heads: slice) -> _ChunkStore:
        return _ChunkStore(KeyValues(self._context.keys[:, heads], self._context.values[:, heads]), self._seq)

    def extend(self, new: KeyValues) -> KeyValues:
        return KeyValues(self._joined(self._context.keys, new.keys), self._joined(self._context.values, new.values))

    def _joined(self, context: Tensor, new: Tensor) -> Tensor:
        # index_select, unlike indexing, adds its gradients up without sorting.
        return torch.cat([context.index_select(0, self._seq).to(new.dtype), new], dim=2)


def block_states(head: DFlashHead, features: Tensor, tokens: Tensor, blocks: AnchorBlocks) -> Tensor:
    """The head's states of all blocks: [chunks, blocks, block_size, hidden_size].

    features [batch, length, joined]: the target's states; tokens int64 [batch, length]
    """
    length = tokens.shape[1]
    columns = torch.arange(length, device=tokens.device)[None]
    entries = head.context_entries(head.context(features), columns)
    rows = blocks.positions.flatten(1)
    every_column = torch.cat([columns.expand(rows.shape[0], -1), rows], dim=1)
    masks = head.layer_masks(blocks.mask(length), rows, every_column)
    ids = blocks.ids(tokens, head.config.mask_token_id).flatten(1)
    states = head.forward_block(ids, [_ChunkStore(layer, blocks.seq) for layer in entries], rows, masks)
    return states.unflatten(1, (-1, blocks.block_size))


def random_order(batch: TrainingBatch) -> Tensor:
    """[batch, length], uniform and decided by the batch's number: a resumed training chooses the same anchors."""
    generator = torch.Generator().manual_seed(batch.number)
    return torch.rand(batch.tokens.shape, generator=generator).to(batch.tokens.device, non_blocking=True)


def possible_anchors(batch: TrainingBatch) -> Tensor:
    """bool [batch, length]: tokens with something before them and a token of the answer after them."""
    selected = batch.answers(1)
    selected[:, 0] = False
    return selected
