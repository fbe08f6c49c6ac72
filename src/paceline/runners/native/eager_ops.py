"""Plain torch: the readable twin of the fused kernels, the path of every CPU, and of long prompts on a GPU.

Rows of a pass lie packed, without padding, so that products see exactly the tokens there are. Attention goes sequence by
sequence: each has its own length, and its keys lie in neighbouring blocks nearly always, so looking back copies nothing.
Only short sequences that read one token each, and fill as many blocks, look back together: for them a call of their own
costs more than copying their blocks side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kv.block_manager import BLOCK_SIZE as TILE
from paceline.runners.native.config import Shape
from paceline.runners.native.kv_cache import BLOCK_SIZE
from paceline.runners.native.quantization import apply_matrix
from paceline.runners.native.weights import LayerWeights, Matrix


@dataclass(frozen=True, slots=True, eq=False)
class Views:
    """A sequence's piece of the cache as seen in each layer, where its blocks are neighbours: made once a pass."""

    fresh_keys: tuple[Tensor, ...]  # each [count, key heads, head size]
    fresh_values: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]  # each [1, key heads, keys, head size]
    values: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TextPart:
    """Where one sequence's nodes are in the pass, and where its keys are in the cache."""

    start: int  # of its nodes in the packed rows
    count: int
    length: int  # tokens cached before this pass
    places: Tensor | slice  # of all length + count tokens, in the flat cache
    fresh: Tensor | slice  # of the new ones alone
    mask: Tensor | None  # additive [count, keys]; None: every node sees everything
    chain: bool = True  # each node follows the one before it
    aside: Tensor | None = None  # where the keys of each of the last nodes are, which follow others: [nodes, keys]
    views: Views | None = None
    tiled: bool = False  # a prompt, read in whole tiles: see `_by_tiles`


@dataclass(frozen=True, slots=True, eq=False)
class BatchedDecodeGroup:
    """Sequences that read one token each and whose keys fill the same number of blocks: they look back in one call."""

    rows: Tensor | slice  # of their tokens in the packed rows, int64 [sequences]; a slice where they are neighbours
    fresh: Tensor  # where those tokens are in the flat cache, int64 [sequences]
    blocks: Tensor  # of all their tokens, sequence after sequence, int64 [sequences · blocks]
    mask: Tensor  # additive [sequences, 1, 1, keys]


@dataclass(frozen=True, slots=True, eq=False)
class EagerBatch:
    """One pass, as plain attention needs to know it."""

    cosines: Tensor  # [nodes, 1, head size]
    sines: Tensor  # of the lower half negative: see `_turned`
    parts: list[TextPart]
    together: list[BatchedDecodeGroup] = field(default_factory=list)


class EagerOps:
    """Plain torch operations over a flat cache: keys and values [layers, tokens, key heads, head size]."""

    def __init__(self, shape: Shape, keys: Tensor, values: Tensor, *, node_by_node: bool = False) -> None:
        """node_by_node: attention takes draft tokens one at a time, as plain decoding would, and prompts tile by tile.

        Wide and narrow attention differ in their last bits. In fp32 that stays there; where the next product steps to
        8 bits it can tip a rounding, and 30 layers make a different sequence of it.
        """
        self.shape, self.keys, self.values = shape, keys, values
        self.node_by_node = node_by_node

    def project(self, x: Tensor, norm: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
        return apply_matrix(weight, self.norm(x, norm), bias)

    def project_add(self, x: Tensor, weight: Matrix, residual: Tensor) -> Tensor:
        return apply_matrix(weight, x, None).add_(residual)

    def gate(self, x: Tensor, norm: Tensor, weight: Matrix) -> Tensor:
        gate, up = apply_matrix(weight, self.norm(x, norm), None).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.shape.eps)

    def attend(self, qkv: Tensor, layer: int, weights: LayerWeights, batch: EagerBatch) -> Tensor:
        shape = self.shape
        heads = qkv.view(qkv.shape[0], shape.heads + 2 * shape.num_kv_heads, shape.head_dim)
        turned = self._turned(heads[:, : shape.heads + shape.num_kv_heads], weights, batch)
        queries, keys = turned[:, : shape.heads], turned[:, shape.heads :]
        values = heads[:, shape.heads + shape.num_kv_heads :]
        if len(batch.parts) == 1 and not batch.together:  # nothing to pick out, nothing to put together
            return self._attention(batch.parts[0], queries, keys, values, layer)
        if len(batch.together) == 1 and not batch.parts:
            return self._look_back_together(batch.together[0], queries, keys, values, layer)
        seen = queries.new_empty(qkv.shape[0], shape.query_width)
        for part in batch.parts:
            here = slice(part.start, part.start + part.count)
            seen[here] = self._attention(part, queries[here], keys[here], values[here], layer)
        for group in batch.together:
            rows = group.rows
            seen[rows] = self._look_back_together(group, queries[rows], keys[rows], values[rows], layer)
        return seen

    def _turned(self, heads: Tensor, weights: LayerWeights, batch: EagerBatch) -> Tensor:
        """Queries and keys, normed where the family does, turned by their position."""
        shape = self.shape
        if weights.query_norm is not None and weights.key_norm is not None:
            queries = self.norm(heads[:, : shape.heads], weights.query_norm)
            heads = torch.cat([queries, self.norm(heads[:, shape.heads :], weights.key_norm)], dim=1)
        return torch.addcmul(heads * batch.cosines, heads.roll(shape.head_dim // 2, dims=-1), batch.sines)

    def views(self, places: Tensor | slice, fresh: Tensor | slice) -> Views | None:
        """What a pass sees of a sequence whose blocks are neighbours; None where they are not."""
        if isinstance(places, Tensor) or isinstance(fresh, Tensor):
            return None
        caches = (self.keys, self.values)
        new_k, new_v = (cache[:, fresh].unbind(0) for cache in caches)
        all_k, all_v = (cache[:, places].transpose(1, 2).unsqueeze(1).unbind(0) for cache in caches)
        return Views(new_k, new_v, all_k, all_v)

    def _attention(self, part: TextPart, q: Tensor, keys: Tensor, values: Tensor, layer: int) -> Tensor:
        if part.views is not None:
            part.views.fresh_keys[layer].copy_(keys)
            part.views.fresh_values[layer].copy_(values)
            k, v = part.views.keys[layer], part.views.values[layer]
        else:
            self.keys[layer][part.fresh] = keys
            self.values[layer][part.fresh] = values
            k = self.keys[layer][part.places].transpose(0, 1)[None]  # [1, key heads, keys, head size]
            v = self.values[layer][part.places].transpose(0, 1)[None]
        if part.tiled:
            return self._by_tiles(q, k, v, part)
        if not self.node_by_node and part.count > 1:
            causal = part.chain and part.length == 0
            return self._causal(q, k, v) if causal else self._folded(q, k, v, part.mask)
        if part.aside is None:
            return self._by_node(q, k, v, part.mask)
        return self._with_asides(q, k, v, part, layer)

    def _look_back_together(self, group: BatchedDecodeGroup, q: Tensor, keys: Tensor, values: Tensor, layer: int) -> Tensor:
        shape, num_seqs = self.shape, q.shape[0]
        looked_at: list[Tensor] = []
        for cache, fresh in ((self.keys[layer], keys), (self.values[layer], values)):
            cache.index_copy_(0, group.fresh, fresh)
            blocks = cache.view(-1, BLOCK_SIZE * shape.num_kv_heads * shape.head_dim).index_select(0, group.blocks)
            looked_at.append(blocks.view(num_seqs, -1, shape.num_kv_heads, shape.head_dim).transpose(1, 2))
        folded = q.view(num_seqs, shape.num_kv_heads, shape.group, shape.head_dim)
        mixed = F.scaled_dot_product_attention(folded, looked_at[0], looked_at[1], attn_mask=group.mask)
        return mixed.reshape(num_seqs, shape.query_width)

    def _by_tiles(self, q: Tensor, k: Tensor, v: Tensor, part: TextPart) -> Tensor:
        """A prompt in tiles that begin at multiples of TILE: the same bits, however it was cut at such places."""
        assert part.mask is not None
        seen: list[Tensor] = []
        at, last = part.length, part.length + part.count
        while at < last:
            edge = (at // TILE + 1) * TILE
            here = slice(at - part.length, min(edge, last) - part.length)
            seen.append(self._folded(q[here], k[:, :, :edge], v[:, :, :edge], part.mask[here, :edge]))
            at = edge
        return torch.cat(seen)

    def _by_node(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Nodes beside each other as a batch, so that each is computed as if it were alone.

        Keys come in whole blocks, those that a node does not see masked: sums then fall into the same lanes however many
        draft tokens follow, and nothing but zeros is added.
        """
        shape, count = self.shape, q.shape[0]
        folded = q.view(count, shape.num_kv_heads, shape.group, shape.head_dim)
        mask = None if mask is None else mask[:, None, None, :]
        if count > 1:
            k, v = k.expand(count, -1, -1, -1), v.expand(count, -1, -1, -1)
        return F.scaled_dot_product_attention(folded, k, v, attn_mask=mask).reshape(count, shape.query_width)

    def _with_asides(self, q: Tensor, k: Tensor, v: Tensor, part: TextPart, layer: int) -> Tensor:
        """A tree: nodes off its first branch get their keys laid out as they will lie if they are accepted."""
        assert part.aside is not None and part.mask is not None
        straight = part.count - part.aside.shape[0]
        first = self._by_node(q[:straight], k, v, part.mask[:straight])
        own_k, own_v = (cache[layer][part.aside].transpose(1, 2) for cache in (self.keys, self.values))
        return torch.cat([first, self._by_node(q[straight:], own_k, own_v, part.mask[straight:])])

    def _folded(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """The query heads of a group sit beside each other as further rows: keys are read once for all of them."""
        shape, count = self.shape, q.shape[0]
        folded = q.view(count, shape.num_kv_heads, shape.group, shape.head_dim).permute(1, 2, 0, 3)
        folded = folded.reshape(1, shape.num_kv_heads, shape.group * count, shape.head_dim)
        wide = None if mask is None else mask.repeat(shape.group, 1)
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=wide)
        out = out.view(shape.num_kv_heads, shape.group, count, shape.head_dim).permute(2, 0, 1, 3)
        return out.reshape(count, shape.query_width)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.shape.group > 1)
        return out[0].transpose(0, 1).reshape(q.shape[2], self.shape.query_width)
