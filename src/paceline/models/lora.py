"""LoRA adapters in PEFT's layout: adapter_config.json and adapter_model.safetensors.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   [rank, in_features]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight   [out_features, rank]

What an adapter may change are the seven projections of a Llama-like layer. What else PEFT can do is refused by name.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import CapabilityError, ModelNotFound, WeightsError
from paceline.layers.gemm_types import Linear
from paceline.layers.lora import LoraLinear, LoraRows, LowRank
from paceline.layers.rope import in_order
from paceline.models.config import ArchConfig
from paceline.models.decoder import DecoderModel, Layer

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PROJECTIONS = {  # of each linear layer, in the order in which it holds them
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
ROTATED = ("self_attn.q_proj", "self_attn.k_proj")
TENSOR = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.((?:self_attn|mlp)\.\w+)\.lora_([AB])\.weight")
# Settings that change the computation, with the values that leave it as it is here.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bias": (None, "none"),
    "fan_in_fan_out": (None, False),
    "use_dora": (None, False),
    "lora_bias": (None, False),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "alora_invocation_tokens": (None, []),
    "layer_replication": (None, []),
}
# Ways to initialise an adapter that also change the base weights, which the adapter's files do not hold.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
Tensors = dict[str, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class LoraAdapter:
    """An adapter: its name, and what it adds to linear layers by (layer, name in PROJECTIONS)."""

    name: str
    deltas: dict[tuple[int, str], LowRank]


def with_adapters(model: DecoderModel, adapters: Sequence[LoraAdapter], rows: LoraRows) -> DecoderModel:
    """The same model, sharing its weights, with adapters for the rows that have one."""

    def adapted(index: int, layer: Layer) -> Layer:
        def wrap(group: str, linear: Linear) -> Linear:
            deltas = {
                adapter.name: adapter.deltas[index, group] for adapter in adapters if (index, group) in adapter.deltas
            }
            return LoraLinear(linear, deltas, rows) if deltas else linear

        return layer.with_linears(wrap)

    return replace(model, layers=[adapted(index, layer) for index, layer in enumerate(model.layers)])


def read_adapter(name: str, folder: Path, config: ArchConfig, dtype: torch.dtype, device: str) -> LoraAdapter:
    """Read a directory that PEFT has written. Raises ModelNotFound, WeightsError or CapabilityError."""
    settings = _settings(name, folder)
    tensors = _tensors(name, folder)
    return LoraAdapter(name, _Reader(name, config, tensors, _scale(name, settings)).deltas(dtype, device))


def _settings(name: str, folder: Path) -> dict[str, Any]:
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ModelNotFound(f"the LoRA adapter {name} needs {CONFIG_FILE}, and {folder} has none")
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{CONFIG_FILE} of the LoRA adapter {name} cannot be read: {error}") from error
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        raise CapabilityError(f"the adapter {name} is not a LoRA adapter: its peft_type is not LORA")
    for setting, neutral in NEUTRAL.items():
        if settings.get(setting) not in neutral:
            value = settings[setting]
            raise CapabilityError(f"the LoRA adapter {name} has {setting} {value!r}, which is not supported")
    if str(settings.get("init_lora_weights")).lower().startswith(CHANGES_BASE):
        raise CapabilityError(
            f"the LoRA adapter {name} has init_lora_weights {settings['init_lora_weights']!r}: it belongs to base "
            "weights that were changed when it was made. Save it as an ordinary LoRA adapter (PEFT's save_pretrained "
            "with path_initial_model_for_weight_conversion), or merge it into its model"
        )
    return settings


def _scale(name: str, settings: dict[str, Any]) -> float:
    """lora_alpha / r, or lora_alpha / sqrt(r) where the adapter was trained so."""
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise WeightsError(f"{CONFIG_FILE} of the LoRA adapter {name} needs r and lora_alpha")
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _tensors(name: str, folder: Path) -> Tensors:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = folder / WEIGHTS_FILE
    if not file.is_file():
        raise WeightsError(f"the LoRA adapter {name} needs {WEIGHTS_FILE}, and {folder} has none")
    try:
        return load_file(file)
    except (SafetensorError, OSError, ValueError) as error:
        raise WeightsError(f"{WEIGHTS_FILE} of the LoRA adapter {name} is damaged: {error}") from error


def _diagonal(blocks: list[Tensor]) -> Tensor:
    """Matrices as the blocks on the diagonal of one."""
    joined = torch.zeros(sum(block.shape[0] for block in blocks), sum(block.shape[1] for block in blocks))
    row = column = 0
    for block in blocks:
        joined[row : row + block.shape[0], column : column + block.shape[1]] = block
        row, column = row + block.shape[0], column + block.shape[1]
    return joined


class _Reader:
    """The tensors of one adapter, sorted into the linear layers that they change."""

    def __init__(self, name: str, config: ArchConfig, tensors: Tensors, scale: float) -> None:
        self._name, self._config, self._scale = name, config, scale
        self._parts: dict[tuple[int, str, str], Tensor] = {}
        for key, tensor in tensors.items():
            self._parts[self._place(key)] = tensor

    def _place(self, key: str) -> tuple[int, str, str]:
        match = TENSOR.fullmatch(key)
        known = {projection for group in PROJECTIONS.values() for projection in group}
        if match is None or match[2] not in known or int(match[1]) >= self._config.num_layers:
            raise CapabilityError(f"the LoRA adapter {self._name} changes {key}, which is not supported here")
        return int(match[1]), match[2], match[3]

    def deltas(self, dtype: torch.dtype, device: str) -> dict[tuple[int, str], LowRank]:
        deltas = {}
        for layer in range(self._config.num_layers):
            for group in PROJECTIONS:
                delta = self._delta(layer, group)
                if delta is not None:
                    deltas[layer, group] = LowRank(delta.down.to(device, dtype), delta.up.to(device, dtype))
        return deltas

    def _delta(self, layer: int, group: str) -> LowRank | None:
        """The products of a joined layer as one: rows of `down` below each other, `up` in blocks on a diagonal."""
        downs, ups, sizes = [], [], self._sizes(group)
        for projection, (out_features, in_features) in zip(PROJECTIONS[group], sizes):
            down, up = self._pair(layer, projection, out_features, in_features)
            downs.append(down)
            ups.append(up)
        if not sum(down.shape[0] for down in downs):
            return None
        return LowRank(torch.cat(downs), _diagonal(ups) * self._scale)

    def _pair(self, layer: int, projection: str, out_features: int, in_features: int) -> tuple[Tensor, Tensor]:
        """A and B in float32, of rank 0 where the adapter leaves the projection as it is."""
        down, up = (self._parts.get((layer, projection, part)) for part in "AB")
        if down is None and up is None:
            return torch.zeros(0, in_features), torch.zeros(out_features, 0)
        if down is None or up is None:
            raise WeightsError(f"the LoRA adapter {self._name} has only one of A and B for {projection} of {layer}")
        if down.shape[1:] != (in_features,) or up.shape != (out_features, down.shape[0]):
            raise WeightsError(
                f"the LoRA adapter {self._name} is for another model: {projection} of layer {layer} has the shapes "
                f"{tuple(down.shape)} and {tuple(up.shape)}, the model's is {out_features} by {in_features}"
            )
        return down.float(), self._rotatable(projection, up.float())

    def _rotatable(self, projection: str, up: Tensor) -> Tensor:
        """Rows of queries and keys come in the order in which the model holds its own."""
        return in_order(up, self._config.rope.order) if projection in ROTATED else up

    def _sizes(self, group: str) -> list[tuple[int, int]]:
        """(out_features, in_features) of each projection of a linear layer."""
        config = self._config
        return {
            "qkv": [(size, config.hidden_size) for size in (config.query_size, config.kv_size, config.kv_size)],
            "output": [(config.hidden_size, config.query_size)],
            "gate_up": [(config.intermediate_size, config.hidden_size)] * 2,
            "down": [(config.hidden_size, config.intermediate_size)],
        }[group]
