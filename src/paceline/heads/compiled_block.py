"""The layers of a DFlash head on a CPU in one call, where its products are in the blocks of the compiled kernels; and
the keys and values of its context in another.

Between its products a layer of a head is some sixty small operations of torch, which cost more than the products.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.heads.block_attention import Angles, BlockAttention
from paceline.heads.block_convolution import BlockConvolution
from paceline.heads.dflash import BlockLayer, ContextProduct, DFlashHead
from paceline.heads.rounded import RoundedLinear
from paceline.layers.cpu_block import (
    BlockLayerWeights,
    BlockSizes,
    CompiledBlock,
    CompiledContext,
    ContextWeights,
    ConvolutionWeights,
)
from paceline.layers.cpu_kernels import WeightBlocks

FIRST_POSITIONS = 512  # whose cosines and sines are computed at first


def compiled_block(head: DFlashHead) -> CompiledBlock | None:
    """The layers of a head whose products are rounded; None where the kernels do not have all it asks for."""
    sizes, layers = _sizes(head), [layer for layer in head.layers if isinstance(layer, BlockLayer)]
    if not sizes.fits_kernels or not all(map(_fits, layers)) or head.config.layer_types:
        return None
    return CompiledBlock(sizes, [_weights(layer) for layer in layers], _vector(head.norm.weight))


def compiled_context(head: DFlashHead, context_product: ContextProduct) -> CompiledContext | None:
    """The products of a context, rounded; None where the kernels do not have all they ask for."""
    sizes, products = _sizes(head), (head.fc, context_product.product)
    if not sizes.fits_kernels or not all(map(_is_plain, products)):
        return None
    input_blocks, entries = map(_blocks, products)
    norms = _vector(head.hidden_norm.weight), _vector(context_product.norms)
    return CompiledContext(sizes, ContextWeights(input_blocks, norms[0], entries, norms[1]))


class RopeTable:
    """Cosines and sines of a head's positions, computed once: they take several operations of torch."""

    def __init__(self, head: DFlashHead) -> None:
        self._rotary, self._table = head.rotary, torch.empty(0)

    def rows(self, first: int, count: int) -> Tensor:
        """Of positions first to first + count: float32 [count, 2, head_dim / 2]."""
        if first + count > len(self._table):
            self._table = self._computed(max(FIRST_POSITIONS, 2 * (first + count)))
        return self._table[first : first + count]

    def _computed(self, size: int) -> Tensor:
        angles = Angles.of(self._rotary, torch.arange(size)[None], torch.float32)
        return torch.stack([angles.cos[0, :, 0], angles.sin[0, :, 0]], dim=1)


@dataclass(frozen=True, slots=True, eq=False)
class CompiledHead:
    """What of a head runs in compiled calls. None: through torch."""

    rope: RopeTable
    block: CompiledBlock | None = None
    context: CompiledContext | None = None


def compiled_head(head: DFlashHead, context_product: ContextProduct) -> CompiledHead:
    """All that the kernels take of a head whose products are rounded."""
    return CompiledHead(RopeTable(head), compiled_block(head), compiled_context(head, context_product))


def _sizes(head: DFlashHead) -> BlockSizes:
    config = head.config
    return BlockSizes(
        config.hidden_size,
        config.intermediate_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.rms_norm_eps,
        config.is_causal,
        config.conv_kernel_size,
        config.conv_group_size if config.conv_kernel_size else config.hidden_size,
    )


def _fits(layer: BlockLayer) -> bool:
    """Every product is in blocks, without a bias; no sinks."""
    products = [module for name, module in layer.named_modules() if name.endswith("_proj")]
    return all(map(_is_plain, products)) and layer.self_attn.attention_sink_bias is None


def _is_plain(product: nn.Module) -> bool:
    return isinstance(product, RoundedLinear) and product.bias is None


def _weights(layer: BlockLayer) -> BlockLayerWeights:
    attention: BlockAttention = layer.self_attn
    return BlockLayerWeights(
        _vector(layer.input_layernorm.weight),
        _vector(attention.q_norm.weight),
        _vector(attention.k_norm.weight),
        _vector(layer.post_attention_layernorm.weight),
        tuple(map(_blocks, (attention.q_proj, attention.k_proj, attention.v_proj))),
        _blocks(attention.o_proj),
        tuple(map(_blocks, (layer.mlp.gate_proj, layer.mlp.up_proj))),
        _blocks(layer.mlp.down_proj),
        _convolution(layer.attention_conv),
        _convolution(layer.mlp_conv),
    )


def _convolution(convolution: BlockConvolution | None) -> ConvolutionWeights | None:
    if convolution is None:
        return None
    return ConvolutionWeights(_vector(convolution.base_kernel), _blocks(convolution.kernel_projection))


def _blocks(linear: nn.Module) -> WeightBlocks:
    assert isinstance(linear, RoundedLinear)
    return linear.blocks


def _vector(weight: Tensor) -> Tensor:
    return weight.detach().float().contiguous()
