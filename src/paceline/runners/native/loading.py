"""What is read of a model's directory beside its weights, and weights in fewer bits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.core.types import ModelInfo
from paceline.errors import WeightsError
from paceline.runners.native import quantization
from paceline.runners.native.config import Shape
from paceline.runners.native.weights import Matrix, Weights

DEFAULT_TEXTS = 8
DEFAULT_TEXT_TOKENS = 8192


def can_fuse(shape: Shape, weights: Weights) -> bool:
    """Whether the fused kernels exist here and take this model."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    half = shape.head_dim // 2
    return not quantization.rounds_inputs(weights.head) and half >= 16 and half & (half - 1) == 0


def default_cache_tokens(shape: Shape) -> int:
    return DEFAULT_TEXTS * min(shape.max_seq_len, DEFAULT_TEXT_TOKENS)


def pack_weights(
    weights: Weights, word: str, pack: Callable[[Tensor, str], Matrix] = quantization.packed
) -> Weights:
    """Every matrix a pass multiplies with, in int8 or int4. The embedding is looked up, not multiplied: it stays."""
    layers = [
        replace(
            layer,
            qkv=pack(layer.qkv, word),
            output=pack(layer.output, word),
            gate_up=pack(layer.gate_up, word),
            down=pack(layer.down, word),
        )
        for layer in weights.layers
    ]
    return Weights(weights.embedding, layers, weights.final_norm, pack(weights.head, word))


def config_of(folder: Path, name: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, json.JSONDecodeError) as error:
        raise WeightsError(f"{name} has no readable config.json: {error}") from error


def eos_token_ids_in(folder: Path, config: Any) -> frozenset[int]:
    """Every token that ends a sequence: by the generation config, or else the model's."""
    path = folder / "generation_config.json"
    output = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    ids = config.eos_token_id if output is None else output
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def model_info(name: str, shape: Shape, ends: frozenset[int], device: str, dtype: str) -> ModelInfo:
    return ModelInfo(name, shape.vocab, ends, shape.max_seq_len, shape.layers, shape.width, device, dtype)
