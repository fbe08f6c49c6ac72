"""The layers of a DFlash head on a CPU in one call, where its products are in the blocks of the compiled kernels.

Between its products a layer of a head is some sixty small operations of torch, which cost more than the products.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.heads.block_attention import Angles, BlockAttention
from paceline.heads.block_convolution import BlockConvolution
from paceline.heads.dflash import BlockLayer, DFlashHead
from paceline.heads.rounded import RoundedLinear
from paceline.layers.cpu_block import BlockLayerWeights, BlockSizes, CompiledBlock, ConvolutionWeights
from paceline.layers.cpu_kernels import WeightBlocks


def compiled_block(head: DFlashHead) -> CompiledBlock | None:
    """The layers of a head whose products are rounded; None where the kernels do not have all it asks for."""
    sizes, layers = _sizes(head), [layer for layer in head.layers if isinstance(layer, BlockLayer)]
    if not sizes.fits_kernels or not all(map(_fits, layers)) or head.config.layer_types:
        return None
    return CompiledBlock(sizes, [_weights(layer) for layer in layers], _vector(head.norm.weight))


def rope_of(head: DFlashHead, positions: Tensor) -> Tensor:
    """Cosines and sines of positions [rows]: float32 [rows, 2, head_dim / 2]."""
    angles = Angles.of(head.rotary, positions[None], torch.float32)
    return torch.stack([angles.cos[0, :, 0], angles.sin[0, :, 0]], dim=1)


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
    rounded = all(isinstance(product, RoundedLinear) and product.bias is None for product in products)
    return rounded and layer.self_attn.attention_sink_bias is None


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
