"""A block of a block drafter through all its layers in one call of the compiled CPU kernels (layers/cpu_block.c), and
the keys and values of its context in another.

Structures mirror those of the C source, field by field.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.layers.cpu_kernels import LANES, VECTOR, CLayer, CLinear, CModel, WeightBlocks, check, joined, library


class CConvolution(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("projection", CLinear)]


class CBlockLayer(ctypes.Structure):
    _fields_ = [("layer", CLayer), ("attention", CConvolution), ("mlp", CConvolution)]


class CBlock(ctypes.Structure):
    _fields_ = [
        ("model", CModel),
        ("layers", ctypes.POINTER(CBlockLayer)),
        ("norm", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("num_layers", "taps", "channels", "length", "rows", "causal")),
    ]


class CContext(ctypes.Structure):
    _fields_ = [
        ("model", CModel),
        ("input", CLinear),
        ("entries", CLinear),
        ("norm", ctypes.c_void_p),
        ("key_norms", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("heads", "length", "rows", "unused")),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class ConvolutionWeights:
    """A convolution around one half of a layer. base: float32 [2, taps, hidden_size]"""

    base: Tensor
    projection: WeightBlocks


@dataclass(frozen=True, slots=True, eq=False)
class BlockLayerWeights:
    """One layer. Norms are float32 vectors; linear layers with the same input are joined."""

    attention_norm: Tensor
    query_norm: Tensor
    key_norm: Tensor
    mlp_norm: Tensor
    qkv: tuple[WeightBlocks, ...]
    output: WeightBlocks
    gate_up: tuple[WeightBlocks, ...]
    down: WeightBlocks
    attention_convolution: ConvolutionWeights | None = None
    mlp_convolution: ConvolutionWeights | None = None

    def structure(self) -> CBlockLayer:
        """For the kernels. It does not keep the weights alive."""
        norms = (self.attention_norm, None, self.query_norm, self.key_norm, None, self.mlp_norm)
        linears = (self.qkv, (self.output,), self.gate_up, (self.down,))
        layer = CLayer(*(None if norm is None else norm.data_ptr() for norm in norms), *map(joined, linears))
        return CBlockLayer(layer, _convolution(self.attention_convolution), _convolution(self.mlp_convolution))


def _convolution(weights: ConvolutionWeights | None) -> CConvolution:
    if weights is None:
        return CConvolution()
    return CConvolution(weights.base.data_ptr(), joined([weights.projection]))


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """taps, channels: of the convolution and of a group that shares its weights; taps 0: there is none."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    causal: bool
    taps: int = 0
    channels: int = 1

    @property
    def fits_kernels(self) -> bool:
        return library() is not None and self.head_dim % LANES == 0 and self.channels % VECTOR == 0


@dataclass(frozen=True, slots=True, eq=False)
class BlockCache:
    """Where the keys and values of one sequence lie, float32 [layers · num_kv_heads, capacity, head_dim].

    length: tokens that are cached; new ones are written behind them. rope: float32 [new rows, 2, head_dim / 2]
    """

    keys: Tensor
    values: Tensor
    length: int
    rope: Tensor

    def structure(self, sizes: BlockSizes) -> CModel:
        """For the kernels. It does not keep the tensors alive."""
        keys, rope = self.keys, self.rope
        assert keys.dtype == torch.float32 and self.length + len(rope) <= keys.shape[1] and keys[0].is_contiguous()
        assert rope.dtype == torch.float32 and rope.is_contiguous()
        return CModel(
            None, rope.data_ptr(), keys.data_ptr(), self.values.data_ptr(), sizes.num_kv_heads * keys.stride(0),
            sizes.head_dim, keys.stride(0), sizes.hidden_size, sizes.intermediate_size, sizes.num_heads,
            sizes.num_kv_heads, sizes.head_dim, 1, sizes.eps, torch.get_num_threads(),
        )  # fmt: skip


class CompiledBlock:
    """All layers of a block drafter and its last norm."""

    def __init__(self, sizes: BlockSizes, layers: list[BlockLayerWeights], norm: Tensor) -> None:
        self._sizes, self._weights, self._norm = sizes, layers, norm
        self._layers = (CBlockLayer * len(layers))(*(layer.structure() for layer in layers))

    def run(self, embeddings: Tensor, cache: BlockCache) -> Tensor:
        """The states of a block behind the last norm, [rows, hidden_size]. Raises OutOfMemory.

        embeddings: float32 [rows, hidden_size]
        """
        sizes, states = self._sizes, embeddings.clone(memory_format=torch.contiguous_format)
        assert len(states) == len(cache.rope)
        block = CBlock(
            cache.structure(sizes), self._layers, self._norm.data_ptr(), len(self._weights), sizes.taps, sizes.channels,
            cache.length, len(states), sizes.causal,
        )  # fmt: skip
        check(_loaded().paceline_run_block(ctypes.byref(block), ctypes.c_void_p(states.data_ptr())))
        return states


@dataclass(frozen=True, slots=True, eq=False)
class ContextWeights:
    """input: states of the target -> hidden states, then norm; entries: those -> keys of all layers, then their values.

    key_norms: float32 [layers · num_kv_heads, head_dim]
    """

    input: WeightBlocks
    norm: Tensor
    entries: WeightBlocks
    key_norms: Tensor


class CompiledContext:
    """Keys and values of all layers of a block drafter, made of the target's states."""

    def __init__(self, sizes: BlockSizes, weights: ContextWeights) -> None:
        self._sizes, self._weights = sizes, weights
        self._linears = joined([weights.input]), joined([weights.entries])

    def run(self, features: Tensor, cache: BlockCache) -> None:
        """Write the entries of these states, float32 [rows, joined]. Raises OutOfMemory."""
        weights, states = self._weights, features.contiguous()
        assert states.shape == (len(cache.rope), weights.input.columns) and states.dtype == torch.float32
        context = CContext(
            cache.structure(self._sizes), *self._linears, weights.norm.data_ptr(), weights.key_norms.data_ptr(),
            len(weights.key_norms), cache.length, len(states), 0,
        )  # fmt: skip
        check(_loaded().paceline_run_context(ctypes.byref(context), ctypes.c_void_p(states.data_ptr())))


def _loaded() -> ctypes.CDLL:
    compiled = library()
    assert compiled is not None, "the caller asks fits_kernels first"
    return compiled
