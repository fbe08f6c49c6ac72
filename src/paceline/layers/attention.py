"""Attention over a paged cache: the eager reference. The Triton form is in layers/attention_triton.py.

Rows of a pass are packed without padding, so that products see exactly the tokens there are. Attention goes sequence by
sequence: each has its own length, and its blocks are nearly always neighbours, so reading its keys copies nothing.
Short sequences that read one token each and fill as many blocks are batched: for them a call of their own costs more
than copying their blocks side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.layers.kv_rounding import STORED_DTYPE, from_cache, to_cache
from paceline.layers.linear_attention import Recurrence
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
class CacheTensors:
    """A flat cache: keys and values [layers, tokens, key heads, head_dim]."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LayerCaches:
    """Where the keys and values of each layer are. Layers with a window have a cache of their own, of fewer tokens."""

    full: CacheTensors
    windowed: CacheTensors | None = None  # None: there are no such layers
    places: tuple[int, ...] = ()  # of each layer among those of its kind; empty: as they are numbered

    def of(self, window: int | None) -> CacheTensors:
        """The cache of layers with this window."""
        return self.full if window is None or self.windowed is None else self.windowed

    def place(self, layer: int) -> int:
        return self.places[layer] if self.places else layer


@dataclass(frozen=True, slots=True, eq=False)
class HeadNorms:
    """Weights of the norms of queries and keys, head by head; None: the architecture has none."""

    query: Tensor | None = None
    key: Tensor | None = None


NO_HEAD_NORMS = HeadNorms()


@dataclass(frozen=True, slots=True, eq=False)
class LayerAttention:
    """What attention of one layer has of its own. The defaults are Llama's."""

    norms: HeadNorms = NO_HEAD_NORMS
    scale: float | None = None  # of the products of queries and keys; None: 1 / sqrt(head_dim)
    window: int | None = None  # tokens that a node sees, itself included; None: all before it
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    sinks: Tensor | None = None  # a further score of each query head that takes its share and adds no value: [heads]
    rope: int | None = 0  # which of the model's rope tables rotates queries and keys; None: they are not rotated
    query_rope: int | None = None  # the table of queries, where they have their own

    @property
    def is_plain(self) -> bool:
        """Whether it differs from Llama's in nothing but head norms."""
        others = (self.scale, self.window, self.softcap, self.sinks, self.query_rope)
        return self.rope == 0 and all(setting is None for setting in others)

    @property
    def is_softmax(self) -> bool:
        """Whether the weights of keys are a softmax of their scores alone, which libraries have kernels for."""
        return self.softcap is None and self.sinks is None


PLAIN_ATTENTION = LayerAttention()


def mix(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kind: LayerAttention) -> Tensor:
    """Values by the weights of their keys. q [batch, key heads, rows, head_dim], the rows query head by query head."""
    if kind.is_softmax:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=kind.scale)
    scores = torch.matmul(q, k.transpose(2, 3)) * (q.shape[-1] ** -0.5 if kind.scale is None else kind.scale)
    if kind.softcap is not None:
        scores = torch.tanh(scores / kind.softcap) * kind.softcap
    if mask is not None:
        scores = scores + mask
    return torch.matmul(_weights(scores, kind.sinks).to(v.dtype), v)


def _weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of scores [batch, key heads, rows, keys] in float32 or wider; a sink takes its share of each row."""
    wide = scores if scores.dtype == torch.float64 else scores.float()
    if sinks is None:
        return torch.softmax(wide, dim=-1)
    by_head = sinks.to(wide.dtype).view(scores.shape[1], -1)
    column = by_head.repeat_interleave(scores.shape[2] // by_head.shape[1], dim=1)[None, :, :, None]
    joined = torch.cat([wide, column.expand(scores.shape[0], -1, -1, -1)], dim=-1)
    return torch.softmax(joined, dim=-1)[..., :-1]


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
    length: int  # tokens before them
    slot_mapping: Tensor | slice  # of the tokens that they read, theirs included, in the flat cache
    new_slots: Tensor | slice  # of theirs alone
    mask: Tensor | None  # additive [count, keys]; None: each node sees every key up to its own
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
class AttentionSpans:
    """Every node of a pass once, with the keys that layers of one window read."""

    spans: list[SequenceSpan]  # a prompt longer than a window is several, each behind the one before it
    groups: list[BatchedDecodeGroup] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class EagerBatch:
    """One pass, as eager attention reads it."""

    rotations: tuple[CosSin, ...]  # of the nodes, by each rope table of the model
    by_window: Mapping[int | None, AttentionSpans]  # None: layers whose nodes see everything before them
    recurrent: Recurrence | None = None  # for recurrent layers, where the model has any


class EagerAttention:
    """Attention over flat caches.

    node_by_node: draft tokens are read one at a time, as plain decoding reads them, and prompts tile by tile. Wide and
    narrow attention differ in their last bits. In float32 that stays there; where the next product rounds its input to
    8 bits, a last bit can change a rounding, and 30 layers make a different sequence of it.
    """

    def __init__(self, sizes: AttentionSizes, caches: LayerCaches, *, node_by_node: bool = False) -> None:
        self.sizes, self.node_by_node, self._caches = sizes, node_by_node, caches

    def views(
        self, slot_mapping: Tensor | slice, new_slots: Tensor | slice, window: int | None = None
    ) -> CacheViews | None:
        """What a pass reads and writes of a sequence whose blocks are neighbours; None: they are not, or rounded."""
        tensors = self._caches.of(window)
        if tensors.keys.dtype == STORED_DTYPE:
            return None
        if isinstance(slot_mapping, Tensor) or isinstance(new_slots, Tensor):
            return None
        caches = (tensors.keys, tensors.values)
        new_k, new_v = (cache[:, new_slots].unbind(0) for cache in caches)
        all_k, all_v = (cache[:, slot_mapping].transpose(1, 2).unsqueeze(1).unbind(0) for cache in caches)
        return CacheViews(new_k, new_v, all_k, all_v)

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, layer: int, kind: LayerAttention, batch: EagerBatch
    ) -> Tensor:
        """Store new keys and values, then attend. Inputs [nodes, heads, head_dim]; output [nodes, query size]."""
        parts = batch.by_window[kind.window]
        if len(parts.spans) == 1 and not parts.groups:  # nothing to pick out, nothing to put together
            return self._span(parts.spans[0], queries, keys, values, layer, kind)
        if len(parts.groups) == 1 and not parts.spans:
            return self._group(parts.groups[0], queries, keys, values, layer, kind)
        out = queries.new_empty(queries.shape[0], self.sizes.query_size)
        for span in parts.spans:
            nodes = slice(span.start, span.start + span.count)
            out[nodes] = self._span(span, queries[nodes], keys[nodes], values[nodes], layer, kind)
        for group in parts.groups:
            rows = group.rows
            out[rows] = self._group(group, queries[rows], keys[rows], values[rows], layer, kind)
        return out

    def _span(
        self, span: SequenceSpan, q: Tensor, keys: Tensor, values: Tensor, layer: int, kind: LayerAttention
    ) -> Tensor:
        if span.views is not None:
            place = self._caches.place(layer)
            span.views.new_keys[place].copy_(keys)
            span.views.new_values[place].copy_(values)
            k, v = span.views.keys[place], span.views.values[place]
        else:
            cache = self._cache(layer, kind)
            k, v = self._stored(cache.keys, keys, span), self._stored(cache.values, values, span)
        if span.tiled:
            return self._by_tiles(q, k, v, span, kind)
        if not self.node_by_node and span.count > 1:
            return self._causal(q, k, v, kind) if span.mask is None else self._folded(q, k, v, span.mask, kind)
        if span.branch_slots is None:
            return self._by_node(q, k, v, span.mask, kind)
        return self._by_branch(q, k, v, span, layer, kind)

    def _cache(self, layer: int, kind: LayerAttention) -> CacheTensors:
        """Of one layer: [tokens, key heads, head_dim]."""
        tensors, place = self._caches.of(kind.window), self._caches.place(layer)
        return CacheTensors(tensors.keys[place], tensors.values[place])

    def _stored(self, cache: Tensor, new: Tensor, span: SequenceSpan) -> Tensor:
        """Write the keys or values of a span, and read all that it sees: [1, key heads, keys, head_dim]."""
        cache[span.new_slots] = to_cache(new, cache)
        return from_cache(cache[span.slot_mapping], new.dtype).transpose(0, 1)[None]

    def _group(
        self, group: BatchedDecodeGroup, q: Tensor, keys: Tensor, values: Tensor, layer: int, kind: LayerAttention
    ) -> Tensor:
        sizes, num_seqs = self.sizes, q.shape[0]
        copies: list[Tensor] = []
        tensors = self._cache(layer, kind)
        for cache, new in ((tensors.keys, keys), (tensors.values, values)):
            cache.index_copy_(0, group.new_slots, to_cache(new, cache))
            blocks = cache.view(-1, sizes.block_size * sizes.num_kv_heads * sizes.head_dim)
            blocks = from_cache(blocks.index_select(0, group.blocks), new.dtype)
            copies.append(blocks.view(num_seqs, -1, sizes.num_kv_heads, sizes.head_dim).transpose(1, 2))
        folded = q.view(num_seqs, sizes.num_kv_heads, sizes.group, sizes.head_dim)
        if self.node_by_node and not kind.is_softmax:  # see `_one_after_another`
            parts = zip(*(torch.split(tensor, 1) for tensor in (folded, *copies, group.mask)))
            return torch.cat([mix(q, k, v, mask, kind) for q, k, v, mask in parts]).reshape(num_seqs, sizes.query_size)
        return mix(folded, copies[0], copies[1], group.mask, kind).reshape(num_seqs, sizes.query_size)

    def _by_tiles(self, q: Tensor, k: Tensor, v: Tensor, span: SequenceSpan, kind: LayerAttention) -> Tensor:
        """A prompt in tiles that begin at multiples of the block size: the same bits, however it is cut there."""
        assert span.mask is not None
        tile, out = self.sizes.block_size, list[Tensor]()
        start, end = span.length, span.length + span.count
        while start < end:
            edge = (start // tile + 1) * tile
            nodes = slice(start - span.length, min(edge, end) - span.length)
            out.append(self._folded(q[nodes], k[:, :, :edge], v[:, :, :edge], span.mask[nodes, :edge], kind))
            start = edge
        return torch.cat(out)

    def _by_node(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kind: LayerAttention) -> Tensor:
        """Nodes beside each other as a batch, so that each is computed as if it were alone.

        Keys come in whole blocks, with those that a node does not see masked: sums then fall into the same lanes
        however many draft tokens follow, and nothing but zeros is added.
        """
        sizes, count = self.sizes, q.shape[0]
        if count > 1 and mask is not None and not kind.is_softmax:
            return self._one_after_another(q, k, v, mask, kind)
        folded = q.view(count, sizes.num_kv_heads, sizes.group, sizes.head_dim)
        mask = None if mask is None else mask[:, None, None, :]
        if count > 1:
            k, v = k.expand(count, -1, -1, -1), v.expand(count, -1, -1, -1)
        return mix(folded, k, v, mask, kind).reshape(count, sizes.query_size)

    def _one_after_another(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, kind: LayerAttention) -> Tensor:
        """Nodes one at a time, each with the blocks that plain decoding reads for it.

        Products of matrices round by their number and by the number of keys, which the kernels of a softmax do not.
        """
        size, out = self.sizes.block_size, list[Tensor]()
        for node, seen in enumerate((mask == 0).to(torch.uint8).flip(1).argmax(dim=1).tolist()):
            end = -(-(mask.shape[1] - seen) // size) * size
            own = slice(node, node + 1) if k.shape[0] > 1 else slice(None)
            keys, values = k[own, :, :end], v[own, :, :end]
            out.append(self._by_node(q[node : node + 1], keys, values, mask[node : node + 1, :end], kind))
        return torch.cat(out)

    def _by_branch(
        self, q: Tensor, k: Tensor, v: Tensor, span: SequenceSpan, layer: int, kind: LayerAttention
    ) -> Tensor:
        """A tree: nodes off its first branch read their keys in the order they will have once accepted."""
        assert span.branch_slots is not None and span.mask is not None
        straight = span.count - span.branch_slots.shape[0]
        first = self._by_node(q[:straight], k, v, span.mask[:straight], kind)
        cache = self._cache(layer, kind)
        branches = (numbers[span.branch_slots] for numbers in (cache.keys, cache.values))
        branch_k, branch_v = (from_cache(branch, q.dtype).transpose(1, 2) for branch in branches)
        return torch.cat([first, self._by_node(q[straight:], branch_k, branch_v, span.mask[straight:], kind)])

    def _folded(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, kind: LayerAttention) -> Tensor:
        """The query heads of a group become further rows: keys are read once for all of them."""
        sizes, count = self.sizes, q.shape[0]
        folded = q.view(count, sizes.num_kv_heads, sizes.group, sizes.head_dim).permute(1, 2, 0, 3)
        folded = folded.reshape(1, sizes.num_kv_heads, sizes.group * count, sizes.head_dim)
        repeated = None if mask is None else mask.repeat(sizes.group, 1)
        out = mix(folded, k, v, repeated, kind)
        out = out.view(sizes.num_kv_heads, sizes.group, count, sizes.head_dim).permute(2, 0, 1, 3)
        return out.reshape(count, sizes.query_size)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor, kind: LayerAttention) -> Tensor:
        if not kind.is_softmax:
            hidden = torch.ones(q.shape[0], q.shape[0], dtype=torch.bool, device=q.device).triu_(1)
            return self._folded(q, k, v, q.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf), kind)
        q = q.transpose(0, 1)[None]
        gqa = self.sizes.group > 1
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=kind.scale, enable_gqa=gqa)
        return out[0].transpose(0, 1).reshape(q.shape[2], self.sizes.query_size)
