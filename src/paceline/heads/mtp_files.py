"""Reads the tensors of an MTP head from the checkpoint of its target, and no others: the rest may be a hundred times
larger. Weights that the checkpoint stores quantized are unpacked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import WeightsError
from paceline.heads.mtp_names import EXPERT, HeadNames
from paceline.hub.shards import weight_files
from paceline.quantization.registry import WeightFormat, format_of, quantization_of

SCALED = (".weight_scale_inv", ".weight_scale", ".input_scale", ".weight_packed", ".weight_shape")


class HeadTensors:
    """Tensors of a directory by their names there, each read when it is asked for."""

    def __init__(self, folder: Path, stack: ExitStack, dtype: torch.dtype, config: Any = None) -> None:
        """dtype: of what is unpacked. config: the Hugging Face config, which names the format of weights."""
        from safetensors import SafetensorError, safe_open

        self._files: dict[str, Any] = {}
        self._dtype = dtype
        self._format: WeightFormat | None = None if config is None else format_of(config)
        self._quantization = {} if config is None else quantization_of(config)
        for path in weight_files(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{path} is damaged or not a safetensors file: {error}") from error
            self._files |= dict.fromkeys(file.keys(), file)

    def names(self) -> Collection[str]:
        return self._files.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def raw(self, name: str) -> Tensor:
        """A tensor as it is stored. Raises WeightsError if it is missing."""
        if name not in self._files:
            raise WeightsError(f"the weights lack the tensor {name}")
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def quantization(self) -> Mapping[str, Any]:
        return self._quantization

    def unpacked(self, name: str) -> Tensor:
        """A tensor in floating point, also where it is stored in another format."""
        layer = name.removesuffix(".weight")
        linear = None if self._format is None or layer == name else self._format.load(self, [layer])
        return self.raw(name) if linear is None else linear.dequantize(self._dtype)


def read_head(tensors: HeadTensors, names: HeadNames) -> dict[str, Tensor]:
    """The tensors of a head under the checkpoint's names, in floating point."""
    return {name: tensors.unpacked(name) for name in names.stored.values() if not name.endswith(SCALED)}


def stacked_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Experts that are stored one by one, in one tensor for all: as the module has them."""
    others = {name: value for name, value in tensors.items() if EXPERT.fullmatch(name) is None}
    experts: dict[tuple[str, str], dict[int, Tensor]] = defaultdict(dict)
    for name, value in tensors.items():
        if match := EXPERT.fullmatch(name):
            experts[match[1], match[3]][int(match[2])] = value
    for block in sorted({block for block, _ in experts}):
        gate, up, down = (_in_order(experts[block, part]) for part in ("gate", "up", "down"))
        if not len(gate) == len(up) == len(down):
            raise WeightsError(f"{block}* is incomplete: it has {len(gate)} gates, {len(up)} ups and {len(down)} downs")
        others[f"{block}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up)])
        others[f"{block}down_proj"] = torch.stack(down)
    return others


def single_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Experts one by one, as checkpoints store them: the reverse of `stacked_experts`. Names are the module's."""
    named: dict[str, Tensor] = {}
    for name, value in tensors.items():
        block, _, part = name.rpartition(".")
        if not block.endswith("mlp.experts"):
            named[name] = value
            continue
        for index, expert in enumerate(value):
            parts = dict(zip(("gate", "up"), expert.chunk(2))) if part == "gate_up_proj" else {"down": expert}
            named |= {f"{block}.{index}.{key}_proj.weight": weight for key, weight in parts.items()}
    return named


def _in_order(experts: Mapping[int, Tensor]) -> list[Tensor]:
    return [experts[index] for index in sorted(experts)]
