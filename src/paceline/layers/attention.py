"""Attention over a paged cache: the eager reference. The Triton form is in layers/attention_triton.py.

Rows of a pass are packed without padding, so that products see exactly the tokens there are. Attention goes sequence by
sequence: each has its own length, and its blocks are nearly always neighbours, so reading its keys copies nothing.
Short sequences that read one token each and fill as many blocks are batched: for them a call of their own costs more
than copying their blocks side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.layers.rope import CosSin


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """Heads of one attention layer, and tokens of one KV block."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """Weights of the norms of queries and keys, head by head; None: the architecture has none."""

    query: Tensor | None = None
    key: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CacheViews:
    """A sequence's part of the cache in each layer, where its blocks are neighbours: computed once a pass."""

    new_keys: tuple[Tensor, ...]  # each [count, key heads, head_dim]
    new_values: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]  # each [1, key heads, keys, head_dim]
    values: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SequenceSpan:
    """Where one sequence's nodes are in the pass, and where its keys are in the cache."""

    start: int  # of its nodes in the packed rows
    count: int
    length: int  # tokens cached before this pass
    slot_mapping: Tensor | slice  # of all length + count tokens, in the flat cache
    new_slots: Tensor | slice  # of the new ones alone
    mask: Tensor | None  # additive [count, keys]; None: every node sees everything
    chain: bool = True  # each node follows the node before it
    branch_slots: Tensor | None = None  # keys of each node off the first branch of a tree: [nodes, keys]
    views: CacheViews | None = None
    tiled: bool = False  # a prompt, read in whole tiles: see `_by_tiles`


@dataclass(frozen=True, slots=True, eq=False)
class BatchedDecodeGroup:
    """Sequences that read one token each and whose keys fill the same number of blocks: one attention call for all."""

    rows: Tensor | slice  # of their tokens in the packed rows, int64 [sequences]; a slice where they are neighbours
    new_slots: Tensor  # of those tokens in the flat cache, int64 [sequences]
    blocks: Tensor  # of all their tokens, sequence after sequence, int64 [sequences · blocks]
    mask: Tensor  # additive [sequences, 1, 1, keys]


@dataclass(frozen=True, slots=True, eq=False)
class EagerBatch:
    """One pass, as eager attention reads it."""

    rotation: CosSin
    spans: list[SequenceSpan]
    groups: list[BatchedDecodeGroup] = field(default_factory=list)


class EagerAttention:
    """Attention over a flat cache: keys and values [layers, tokens, key heads, head_dim].

    node_by_node: draft tokens are read one at a time, as plain decoding reads them, and prompts tile by tile. Wide and
    narrow attention differ in their last bits. In float32 that stays there; where the next product rounds its input to
    8 bits, a last bit can change a rounding, and 30 layers make a different sequence of it.
    """

    def __init__(self, sizes: AttentionSizes, keys: Tensor, values: Tensor, *, node_by_node: bool = False) -> None:
        self.sizes, self.keys, self.values = sizes, keys, values
        self.node_by_node = node_by_node

    def views(self, slot_mapping: Tensor | slice, new_slots: Tensor | slice) -> CacheViews | None:
        """What a pass reads and writes of a sequence whose blocks are neighbours; None where they are not."""
        if isinstance(slot_mapping, Tensor) or isinstance(new_slots, Tensor):
            return None
        caches = (self.keys, self.values)
        new_k, new_v = (cache[:, new_slots].unbind(0) for cache in caches)
        all_k, all_v = (cache[:, slot_mapping].transpose(1, 2).unsqueeze(1).unbind(0) for cache in caches)
        return CacheViews(new_k, new_v, all_k, all_v)

    def __call__(self, queries: Tensor, keys: Tensor, values: Tensor, layer: int, batch: EagerBatch) -> Tensor:
        """Store new keys and values, then attend. Inputs [nodes, heads, head_dim]; output [nodes, query size]."""
        if len(batch.spans) == 1 and not batch.groups:  # nothing to pick out, nothing to put together
            return self._span(batch.spans[0], queries, keys, values, layer)
        if len(batch.groups) == 1 and not batch.spans:
            return self._group(batch.groups[0], queries, keys, values, layer)
        out = queries.new_empty(queries.shape[0], self.sizes.query_size)
        for span in batch.spans:
            nodes = slice(span.start, span.start + span.count)
            out[nodes] = self._span(span, queries[nodes], keys[nodes], values[nodes], layer)
        for group in batch.groups:
            rows = group.rows
            out[rows] = self._group(group, queries[rows], keys[rows], values[rows], layer)
        return out

    def _span(self, span: SequenceSpan, q: Tensor, keys: Tensor, values: Tensor, layer: int) -> Tensor:
        if span.views is not None:
            span.views.new_keys[layer].copy_(keys)
            span.views.new_values[layer].copy_(values)
            k, v = span.views.keys[layer], span.views.values[layer]
        else:
            self.keys[layer][span.new_slots] = keys
            self.values[layer][span.new_slots] = values
            k = self.keys[layer][span.slot_mapping].transpose(0, 1)[None]  # [1, key heads, keys, head_dim]
            v = self.values[layer][span.slot_mapping].transpose(0, 1)[None]
        if span.tiled:
            return self._by_tiles(q, k, v, span)
        if not self.node_by_node and span.count > 1:
            causal = span.chain and span.length == 0
            return self._causal(q, k, v) if causal else self._folded(q, k, v, span.mask)
        if span.branch_slots is None:
            return self._by_node(q, k, v, span.mask)
        return self._by_branch(q, k, v, span, layer)

    def _group(self, group: BatchedDecodeGroup, q: Tensor, keys: Tensor, values: Tensor, layer: int) -> Tensor:
        sizes, num_seqs = self.sizes, q.shape[0]
        copies: list[Tensor] = []
        for cache, new in ((self.keys[layer], keys), (self.values[layer], values)):
            cache.index_copy_(0, group.new_slots, new)
            blocks = cache.view(-1, sizes.block_size * sizes.num_kv_heads * sizes.head_dim)
            blocks = blocks.index_select(0, group.blocks)
            copies.append(blocks.view(num_seqs, -1, sizes.num_kv_heads, sizes.head_dim).transpose(1, 2))
        folded = q.view(num_seqs, sizes.num_kv_heads, sizes.group, sizes.head_dim)
        mixed = F.scaled_dot_product_attention(folded, copies[0], copies[1], attn_mask=group.mask)
        return mixed.reshape(num_seqs, sizes.query_size)

    def _by_tiles(self, q: Tensor, k: Tensor, v: Tensor, span: SequenceSpan) -> Tensor:
        """A prompt in tiles that begin at multiples of the block size: the same bits, however it is cut there."""
        assert span.mask is not None
        tile, out = self.sizes.block_size, list[Tensor]()
        start, end = span.length, span.length + span.count
        while start < end:
            edge = (start // tile + 1) * tile
            nodes = slice(start - span.length, min(edge, end) - span.length)
            out.append(self._folded(q[nodes], k[:, :, :edge], v[:, :, :edge], span.mask[nodes, :edge]))
            start = edge
        return torch.cat(out)

    def _by_node(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Nodes beside each other as a batch, so that each is computed as if it were alone.

        Keys come in whole blocks, with those that a node does not see masked: sums then fall into the same lanes
        however many draft tokens follow, and nothing but zeros is added.
        """
        sizes, count = self.sizes, q.shape[0]
        folded = q.view(count, sizes.num_kv_heads, sizes.group, sizes.head_dim)
        mask = None if mask is None else mask[:, None, None, :]
        if count > 1:
            k, v = k.expand(count, -1, -1, -1), v.expand(count, -1, -1, -1)
        return F.scaled_dot_product_attention(folded, k, v, attn_mask=mask).reshape(count, sizes.query_size)

    def _by_branch(self, q: Tensor, k: Tensor, v: Tensor, span: SequenceSpan, layer: int) -> Tensor:
        """A tree: nodes off its first branch read their keys in the order they will have once accepted."""
        assert span.branch_slots is not None and span.mask is not None
        straight = span.count - span.branch_slots.shape[0]
        first = self._by_node(q[:straight], k, v, span.mask[:straight])
        branch_k, branch_v = (cache[layer][span.branch_slots].transpose(1, 2) for cache in (self.keys, self.values))
        return torch.cat([first, self._by_node(q[straight:], branch_k, branch_v, span.mask[straight:])])

    def _folded(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """The query heads of a group become further rows: keys are read once for all of them."""
        sizes, count = self.sizes, q.shape[0]
        folded = q.view(count, sizes.num_kv_heads, sizes.group, sizes.head_dim).permute(1, 2, 0, 3)
        folded = folded.reshape(1, sizes.num_kv_heads, sizes.group * count, sizes.head_dim)
        repeated = None if mask is None else mask.repeat(sizes.group, 1)
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=repeated)
        out = out.view(sizes.num_kv_heads, sizes.group, count, sizes.head_dim).permute(2, 0, 1, 3)
        return out.reshape(count, sizes.query_size)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.sizes.group > 1)
        return out[0].transpose(0, 1).reshape(q.shape[2], self.sizes.query_size)
