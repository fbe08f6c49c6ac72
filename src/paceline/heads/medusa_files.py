"""Files of Medusa heads: the original layout and vLLM's.

original  `{h}.{l}.linear.weight`, `{h}.{l}.linear.bias`, `{h}.{L}.weight`      medusa_lm_head.{safetensors,pt}
vllm      `blocks.{h}.layers.{l}.weight`, `lm_heads.{h}.weight`, `token_map`    model.safetensors

Heads and layers are counted from the names: published configs say 2 heads where the file holds 5.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import OptionError, WeightsError
from paceline.heads.checkpoint import Checkpoint, install, number, write_checkpoint
from paceline.heads.medusa import MedusaConfig, MedusaHeads

LAYOUTS = ("original", "vllm")
ORIGINAL_LAYER = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
ORIGINAL_HEAD = re.compile(r"(\d+)\.(\d+)\.weight")
VLLM_LAYER = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
VLLM_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")
SHARED_HEAD = "lm_head.weight"  # vLLM: all heads speak through one matrix


def is_medusa(names: Iterable[str]) -> bool:
    """Whether tensors are called as Medusa's are."""
    patterns = (ORIGINAL_LAYER, ORIGINAL_HEAD, VLLM_LAYER, VLLM_HEAD)
    return any(pattern.fullmatch(name) for name in names for pattern in patterns)


def our_name(name: str) -> str:
    """How `MedusaHeads` calls a tensor of either layout."""
    if found := ORIGINAL_LAYER.fullmatch(name):
        return f"blocks.{found[1]}.{found[2]}.linear.{found[3]}"
    if found := VLLM_LAYER.fullmatch(name):
        return f"blocks.{found[1]}.{found[2]}.linear.{found[3]}"
    if found := ORIGINAL_HEAD.fullmatch(name):
        return f"lm_heads.{found[1]}.weight"
    return name


def build_medusa(checkpoint: Checkpoint) -> MedusaHeads:
    """The heads a checkpoint holds. Raises WeightsError naming the tensor that does not fit."""
    tensors = {our_name(name): value for name, value in checkpoint.tensors.items()}
    vllm = any(VLLM_LAYER.fullmatch(name) or VLLM_HEAD.fullmatch(name) for name in checkpoint.tensors)
    _spread_shared_head(tensors)
    config = _counted(tensors, checkpoint)
    if "token_map" not in tensors and config.draft_vocab_size == config.vocab_size:
        tensors["token_map"] = torch.arange(config.vocab_size)
    heads = MedusaHeads(config)
    called = partial(_written, layout=LAYOUTS[vllm], layers=config.layers)
    install(heads, Checkpoint(checkpoint.folder, checkpoint.config, tensors, called))
    return heads.eval()


def _spread_shared_head(tensors: dict[str, Tensor]) -> None:
    shared = tensors.pop(SHARED_HEAD, None)
    if shared is None:
        return
    for index in {name.split(".")[1] for name in tensors if name.startswith("blocks.")}:
        tensors.setdefault(f"lm_heads.{index}.weight", shared)


def _counted(tensors: dict[str, Tensor], checkpoint: Checkpoint) -> MedusaConfig:
    speaking = [name for name in tensors if name.startswith("lm_heads.")]
    places = [name.split(".")[1:3] for name in tensors if name.startswith("blocks.")]
    if not speaking:
        raise WeightsError(f"{checkpoint.folder} is incomplete: no head's last matrix is there")
    heads = 1 + max([int(name.split(".")[1]) for name in speaking] + [int(head) for head, _ in places])
    layers = 1 + max((int(layer) for _, layer in places), default=-1)
    rows, width = tensors[speaking[0]].shape
    vocabulary = int(number(checkpoint.config, "vocab_size", rows))
    bias = any(name.endswith(".bias") for name in tensors)
    return MedusaConfig(heads, layers, width, max(vocabulary, rows), rows, bias)


def _written(name: str, layout: str, layers: int) -> str:
    """How a layout calls one of our tensors."""
    part = name.split(".")
    if part[0] == "blocks" and len(part) == 5:
        head, layer, end = part[1], part[2], part[4]
        return f"{head}.{layer}.linear.{end}" if layout == "original" else f"blocks.{head}.layers.{layer}.{end}"
    if part[0] == "lm_heads" and layout == "original":
        return f"{part[1]}.{layers}.weight"
    return name


def save_medusa(
    heads: MedusaHeads,
    folder: str | Path,
    *,
    layout: str = "original",
    target: str = "",
    dtype: torch.dtype | None = None,
) -> None:
    """Write heads in the original layout or in vLLM's, which alone knows a reduced vocabulary."""
    config = heads.config
    if layout not in LAYOUTS:
        raise OptionError(f"Medusa heads are written in the layout {' or '.join(LAYOUTS)}, not {layout!r}")
    reduced = config.draft_vocab_size < config.vocab_size
    if reduced and layout == "original":
        raise OptionError("the original Medusa layout has no room for a reduced vocabulary; write the layout vllm")
    tensors = {}
    for name, value in heads.state_dict().items():
        if name != "token_map" or reduced:
            wanted = value.to(dtype) if dtype is not None and value.is_floating_point() else value
            tensors[_written(name, layout, config.layers)] = wanted
    file = "medusa_lm_head.safetensors" if layout == "original" else "model.safetensors"
    write_checkpoint(folder, _config(config, layout, target), tensors, file)


def _config(config: MedusaConfig, layout: str, target: str) -> dict[str, Any]:
    if layout == "original":
        return {
            "medusa_num_heads": config.heads,
            "medusa_num_layers": config.layers,
            "base_model_name_or_path": target,
        }
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": target,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
        "num_heads": config.heads,
        "num_hidden_layers": config.layers,
        "medusa_fc_bias": config.bias,
        "original_lm_head": False,
    }
