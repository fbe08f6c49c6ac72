"""Weights of the family, straight from safetensors to the device, with the products that belong together joined."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import OutOfMemory, WeightsError
from paceline.runners.native.config import Shape

Fetch = Callable[[str], Tensor | None]
Matrix = Any  # a Tensor [out, in], or one of quantized.py's packed matrices


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """One layer. q, k, v are one matrix, gate and up are one matrix."""

    attention_norm: Tensor
    qkv: Matrix
    qkv_bias: Tensor | None
    output: Matrix
    query_norm: Tensor | None
    key_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """A whole model."""

    embedding: Tensor
    layers: list[LayerWeights]
    final_norm: Tensor
    head: Matrix


class _Safetensors:
    """Tensors by name from the shards of a directory. Opens each file once."""

    def __init__(self, folder: Path, stack: ExitStack, device: str) -> None:
        from safetensors import SafetensorError, safe_open

        self._places: dict[str, Any] = {}
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise WeightsError(f"{folder} holds no safetensors files")
        for file in files:
            try:
                opened = stack.enter_context(safe_open(file, framework="pt", device=device))
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{file.name} is damaged or incomplete: {error}") from error
            self._places |= dict.fromkeys(opened.keys(), opened)

    def __call__(self, name: str) -> Tensor | None:
        opened = self._places.get(name)
        return None if opened is None else opened.get_tensor(name)


def load_weights(folder: Path, shape: Shape, dtype: torch.dtype, device: str) -> Weights:
    """Read a directory. A missing tensor, or one of the wrong shape, is named."""
    with ExitStack() as stack:
        # One copy to the device and nothing kept on the host; joined matrices are built layer by layer.
        fetch = _Safetensors(folder, stack, device)
        try:
            return gather(fetch, shape, dtype, device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"{folder.name} does not fit on {device}: choose a smaller --dtype") from error


def weights_of(model: Any, shape: Shape) -> Weights:
    """The weights of a loaded transformers model. Joined matrices are copies, the rest is shared."""
    state = dict(model.state_dict())
    first = next(model.parameters())
    return gather(state.get, shape, first.dtype, str(first.device))


def gather(fetch: Fetch, shape: Shape, dtype: torch.dtype, device: str) -> Weights:
    def need(name: str, *size: int) -> Tensor:
        found = fetch(name)
        if found is None:
            raise WeightsError(f"the weights lack the tensor {name}")
        if tuple(found.shape) != size:
            raise WeightsError(f"the tensor {name} is {tuple(found.shape)}; the config says {size}")
        return found.to(device, dtype)

    layers = [_layer(fetch, need, f"model.layers.{seq_id}.", shape, dtype, device) for seq_id in range(shape.layers)]
    embedding = need("model.embed_tokens.weight", shape.vocab, shape.width)
    tied = shape.tied or fetch("lm_head.weight") is None
    head = embedding if tied else need("lm_head.weight", shape.vocab, shape.width)
    return Weights(embedding, layers, need("model.norm.weight", shape.width), head)


def _layer(
    fetch: Fetch, need: Callable[..., Tensor], prefix: str, shape: Shape, dtype: torch.dtype, device: str
) -> LayerWeights:
    sizes = {"q": shape.query_width, "k": shape.kv_width, "v": shape.kv_width}
    bias = None
    if fetch(prefix + "self_attn.q_proj.bias") is not None:
        bias = torch.cat([need(f"{prefix}self_attn.{part}_proj.bias", size) for part, size in sizes.items()])
    normed = shape.head_norm
    query_norm = need(prefix + "self_attn.q_norm.weight", shape.head_dim) if normed else None
    key_norm = need(prefix + "self_attn.k_norm.weight", shape.head_dim) if normed else None
    return LayerWeights(
        need(prefix + "input_layernorm.weight", shape.width),
        torch.cat([need(f"{prefix}self_attn.{part}_proj.weight", size, shape.width) for part, size in sizes.items()]),
        bias,
        need(prefix + "self_attn.o_proj.weight", shape.width, shape.query_width),
        query_norm,
        key_norm,
        need(prefix + "post_attention_layernorm.weight", shape.width),
        torch.cat([need(f"{prefix}mlp.{part}_proj.weight", shape.inner, shape.width) for part in ("gate", "up")]),
        need(prefix + "mlp.down_proj.weight", shape.width, shape.inner),
    )


def matrices(weights: Weights) -> Iterator[Tensor]:
    """Every matrix a pass reads from end to end: what the memory-bandwidth limit counts."""
    for layer in weights.layers:
        yield from (layer.qkv, layer.output, layer.gate_up, layer.down)
    yield weights.head
