"""The layers of a pass as one call of compiled code, on CPUs: weights in blocks or in float32, float32 between them.

What a token computes depends on nothing but the tokens before it: not on the width of the pass, on the other rows, or
on where a prompt is cut.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.types import Row
from paceline.layers.cpu_kernels import LANES, CBatch, CLayer, CModel, joined, norm_rows, run_layers
from paceline.layers.decoder_layer import LayerWeights
from paceline.layers.norm import Norm
from paceline.layers.ops import EagerOps
from paceline.models.decoder import DecoderModel, LayerOutput
from paceline.runners.native.kv_cache import KVCache, own


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """The layers that run, from first up to but not including last, and those whose input is kept."""

    first: int
    last: int
    features: tuple[int, ...] = ()


class CompiledLayers:
    """All layers of a model, run by layers/cpu_kernels.c. `of` makes them where they fit."""

    def __init__(self, model: DecoderModel, weights: list[LayerWeights], kv: KVCache, rope_cache: Tensor) -> None:
        self._kv, self._weights, self._rope_cache = kv, weights, rope_cache
        self._layers = (CLayer * len(weights))(*map(_layer, weights))
        config = model.config
        self._model = CModel(
            self._layers, rope_cache.data_ptr(), kv.keys.data_ptr(), kv.values.data_ptr(), kv.keys.stride(0),
            config.num_kv_heads * config.head_dim, config.head_dim, config.hidden_size, config.intermediate_size,
            config.num_heads, config.num_kv_heads, config.head_dim, kv.block_size, config.rms_norm_eps, 1,
        )  # fmt: skip

    @classmethod
    def of(cls, model: DecoderModel, kv: KVCache, rope_cache: Tensor) -> CompiledLayers | None:
        """None: a layer of another kind, a weight that is not in blocks, or sizes that the kernels do not take."""
        weights = [layer.weights() for layer in model.layers]
        whole = [layer for layer in weights if layer is not None and layer.is_blocked]
        if len(whole) < len(weights) or model.config.head_dim % LANES or kv.keys.dtype != torch.float32:
            return None
        return cls(model, whole, kv, rope_cache)

    def run(self, hidden_states: Tensor, rows: list[Row], span: LayerSpan, skips: list[int]) -> LayerOutput:
        """As DecoderModel.run_layers. skips: nodes at the start of each row that are cached already."""
        states = hidden_states.contiguous()
        kept = sorted(layer for layer in set(span.features) if span.first <= layer <= span.last)
        features = run_layers(self._model, self._batch(rows, skips), states, span.first, span.last, kept)
        return LayerOutput(states, features)

    def _batch(self, rows: list[Row], skips: list[int]) -> CBatch:
        lengths, counts = [row.seq_cache.length for row in rows], [len(row.parents) for row in rows]
        ends = [length + count for length, count in zip(lengths, counts)]
        assert max(ends) <= self._rope_cache.shape[0], "a sequence is longer than the model reads"
        tables = [
            block
            for row, end in zip(rows, ends)
            for block in self._kv.full.table(own(row.seq_cache))[: -(-end // self._kv.block_size)]
        ]
        parents = rows[0].parents if len(rows) == 1 else [parent for row in rows for parent in row.parents]
        parts = (lengths, counts, skips, parents, tables)
        return CBatch(*map(_integers, parts), len(rows), sum(counts) - sum(skips))


class CompiledOps(EagerOps):
    """Of the operations around compiled layers, the norm: through torch it takes as long as half a layer."""

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        weight = norm.rms_weight
        if weight is None or weight.dtype != torch.float32 or x.dtype != torch.float32 or x.shape[-1] % LANES:
            return super().norm(x, norm)
        return norm_rows(x, weight, self._eps)


def _integers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int32]:
    return (ctypes.c_int32 * len(values))(*values)


def _layer(weights: LayerWeights) -> CLayer:
    vectors = (
        weights.attention_norm, weights.qkv_bias, weights.query_norm, weights.key_norm, weights.output_bias,
        weights.mlp_norm,
    )  # fmt: skip
    blocks = (weights.qkv_blocks, weights.output_blocks, weights.gate_up_blocks, weights.down_blocks)
    return CLayer(*map(_vector, vectors), *(joined(pieces) for pieces in blocks if pieces is not None))


def _vector(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
