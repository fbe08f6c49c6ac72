"""Plain torch: the readable twin of the fused kernels, the path of every CPU, and of long prompts on a GPU.

Rows of a pass lie packed, without padding, so that products see exactly the tokens there are. Attention goes text by
text: each has its own length, and its keys lie in neighbouring pages nearly always, so looking back copies nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.runners.native.quantized import apply_matrix
from paceline.runners.native.shape import Shape
from paceline.runners.native.weights import LayerWeights, Matrix

LONGEST_ONE_BY_ONE = 32


@dataclass(frozen=True, slots=True, eq=False)
class TextPart:
    """Where one text's nodes are in the pass, and where its keys are in the cache."""

    start: int  # of its nodes in the packed rows
    count: int
    length: int  # tokens cached before this pass
    places: Tensor | slice  # of all length + count tokens, in the flat cache
    fresh: Tensor | slice  # of the new ones alone
    mask: Tensor | None  # additive [count, length + count]; None: every node sees everything
    chain: bool = True  # each node follows the one before it


@dataclass(frozen=True, slots=True, eq=False)
class PlainBatch:
    """One pass, as plain attention needs to know it."""

    turn: Tensor  # [nodes, 2, head size / 2] cosines and sines
    parts: list[TextPart]


class PlainOps:
    """Plain torch operations over a flat cache: keys and values [layers, tokens, key heads, head size]."""

    def __init__(self, shape: Shape, keys: Tensor, values: Tensor, *, node_by_node: bool = False) -> None:
        """node_by_node: attention of a short chain takes its nodes one at a time, as plain decoding would.

        Wide and narrow attention differ in their last bits. In fp32 that stays there; where the next product rounds to
        8 bits it can tip a rounding, and 30 layers make a different text of it.
        """
        self.shape, self.keys, self.values = shape, keys, values
        self.node_by_node = node_by_node

    def project(self, x: Tensor, norm: Tensor, weight: Matrix, bias: Tensor | None) -> Tensor:
        return apply_matrix(weight, self.norm(x, norm), bias)

    def project_add(self, x: Tensor, weight: Matrix, residual: Tensor) -> Tensor:
        return residual + apply_matrix(weight, x, None)

    def gate(self, x: Tensor, norm: Tensor, weight: Matrix) -> Tensor:
        gate, up = apply_matrix(weight, self.norm(x, norm), None).chunk(2, dim=-1)
        return F.silu(gate) * up

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.shape.eps)

    def attend(self, qkv: Tensor, layer: int, weights: LayerWeights, batch: PlainBatch) -> Tensor:
        shape = self.shape
        heads = qkv.view(qkv.shape[0], shape.heads + 2 * shape.kv_heads, shape.head_size)
        turned = self._turned(heads[:, : shape.heads + shape.kv_heads], weights, batch.turn)
        queries, keys = turned[:, : shape.heads], turned[:, shape.heads :]
        values = heads[:, shape.heads + shape.kv_heads :]
        seen = [self._look_back(part, queries, keys, values, layer) for part in batch.parts]
        return seen[0] if len(seen) == 1 else torch.cat(seen)

    def _turned(self, heads: Tensor, weights: LayerWeights, turn: Tensor) -> Tensor:
        """Queries and keys, normed where the family does, turned by their position."""
        shape = self.shape
        if weights.query_norm is not None and weights.key_norm is not None:
            queries = self.norm(heads[:, : shape.heads], weights.query_norm)
            heads = torch.cat([queries, self.norm(heads[:, shape.heads :], weights.key_norm)], dim=1)
        cos, sin = turn[:, None, 0], turn[:, None, 1]
        low, high = heads[..., : shape.head_size // 2], heads[..., shape.head_size // 2 :]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)

    def _look_back(self, part: TextPart, queries: Tensor, keys: Tensor, values: Tensor, layer: int) -> Tensor:
        here = slice(part.start, part.start + part.count)
        self.keys[layer][part.fresh] = keys[here]
        self.values[layer][part.fresh] = values[here]
        k = self.keys[layer][part.places].transpose(0, 1)[None]  # [1, key heads, all tokens, head size]
        v = self.values[layer][part.places].transpose(0, 1)[None]
        q = queries[here]
        if part.chain and part.length == 0 and part.count > 1:
            return self._causal(q, k, v)
        if self.node_by_node and part.chain and 1 < part.count <= LONGEST_ONE_BY_ONE:
            ends = range(part.length + 1, part.length + part.count + 1)
            nodes = [self._folded(q[i : i + 1], k[:, :, :end], v[:, :, :end], None) for i, end in enumerate(ends)]
            return torch.cat(nodes)
        return self._folded(q, k, v, part.mask)

    def _folded(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """The query heads of a group sit beside each other as further rows: keys are read once for all of them."""
        shape, count = self.shape, q.shape[0]
        folded = q.view(count, shape.kv_heads, shape.group, shape.head_size).permute(1, 2, 0, 3)
        folded = folded.reshape(1, shape.kv_heads, shape.group * count, shape.head_size)
        wide = None if mask is None else mask.repeat(shape.group, 1)
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=wide)
        out = out.view(shape.kv_heads, shape.group, count, shape.head_size).permute(2, 0, 1, 3)
        return out.reshape(count, shape.query_width)

    def _causal(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = q.transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.shape.group > 1)
        return out[0].transpose(0, 1).reshape(q.shape[2], self.shape.query_width)
