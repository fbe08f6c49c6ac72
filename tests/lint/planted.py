"""Mistakes planted in the files of a head, and copies of it that are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.heads.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from paceline.heads.eagle3 import Eagle3Head
from paceline.heads.registry import load_head, save_head
from paceline.lint.transformer_readings import pairs_of_halves

LAYERS = "eagle_aux_hidden_state_layer_ids"
Plant = Callable[[Checkpoint], Checkpoint]


def config(**changes: Any) -> Plant:
    return lambda files: replace(files, config={**files.config, **changes})


def layers(change: Callable[[list[int]], list[int]]) -> Plant:
    def plant(files: Checkpoint) -> Checkpoint:
        section = files.config["eagle_config"]
        return replace(files, config={**files.config, "eagle_config": {**section, LAYERS: change(section[LAYERS])}})

    return plant


def tensors(ending: str, change: Callable[[Tensor], Tensor]) -> Plant:
    def plant(files: Checkpoint) -> Checkpoint:
        changed = {name: change(value) for name, value in files.tensors.items() if name.endswith(ending)}
        assert changed, ending
        return replace(files, tensors={**files.tensors, **changed})

    return plant


def all_of(*plants: Plant) -> Plant:
    def plant(files: Checkpoint) -> Checkpoint:
        for step in plants:
            files = step(files)
        return files

    return plant


def halves_exchanged(weight: Tensor) -> Tensor:
    half = weight.shape[1] // 2
    return torch.cat([weight[:, half:], weight[:, :half]], dim=1)


def one_less(weight: Tensor) -> Tensor:
    return (weight.float() - 1).to(weight.dtype)


def interleaved(weight: Tensor) -> Tensor:
    return pairs_of_halves(weight, 64)


# Of the shipped EAGLE head: the mistake, and the readings that the linter must name.
MISTAKES: dict[str, tuple[Plant, tuple[str, ...]]] = {
    "layers one too high": (layers(lambda ids: [layer + 1 for layer in ids]), ("layers one lower",)),
    "layers one too low": (layers(lambda ids: [layer - 1 for layer in ids]), ("layers one higher",)),
    "layers from high to low": (layers(lambda ids: ids[::-1]), ("layers from low to high",)),
    "norm_before_residual": (config(norm_before_residual=True), ("residual after its norm off",)),
    "norm_output": (config(norm_output=True), ("feed back after the norm off",)),
    "hidden before embedding": (
        all_of(*(tensors(f"{name}_proj.weight", halves_exchanged) for name in "qkv")), ("[hidden; embedding]",)
    ),
    "rope of neighbours": (
        all_of(tensors("q_proj.weight", interleaved), tensors("k_proj.weight", interleaved)), ("rope interleaved",)
    ),
    "ids in d2t": (tensors("d2t", lambda offsets: offsets + torch.arange(len(offsets))), ("d2t as ids",)),
    "head_dim": (config(head_dim=32), ("head_dim 64",)),
    "norms around zero": (tensors("norm.weight", one_less), ("norms around zero",)),
    "two mistakes": (
        all_of(config(head_dim=32), tensors("d2t", lambda offsets: offsets + torch.arange(len(offsets)))),
        ("d2t as ids", "head_dim 64"),
    ),
}  # fmt: skip


# --- correct copies ---------------------------------------------------------------------------------------------------


def resaved(layout: str, dtype: torch.dtype) -> Callable[[Path, Path], None]:
    """Written by paceline in a layout and a dtype."""

    def write(source: Path, folder: Path) -> None:
        save_head(load_head(source, Eagle3Head), folder, layout=layout, dtype=dtype)

    return write


def prefixed(source: Path, folder: Path) -> None:
    """With the wrapper module that some trainers save around a head."""
    files = read_checkpoint(source)
    write_checkpoint(folder, files.config, {f"model.{name}": value for name, value in files.tensors.items()})


def pickled(source: Path, folder: Path) -> None:
    files = read_checkpoint(source)
    write_checkpoint(folder, files.config, {})
    (folder / "model.safetensors").unlink()
    torch.save(files.tensors, folder / "pytorch_model.bin")


def sparse(source: Path, folder: Path) -> None:
    """What a config may leave out, left out."""
    files = read_checkpoint(source)
    absent = ("norm_before_residual", "norm_output", "head_dim", "eagle_config", "fc_norm", "norm_before_fc")
    kept = {name: value for name, value in files.config.items() if name not in absent}
    tensors = {name: value for name, value in files.tensors.items() if name != "t2d"}
    write_checkpoint(folder, kept, tensors)


COPIES: dict[str, Callable[[Path, Path], None]] = {
    "original bf16": resaved("original", torch.bfloat16),
    "original fp32": resaved("original", torch.float32),
    "original fp16": resaved("original", torch.float16),
    "speculators bf16": resaved("speculators", torch.bfloat16),
    "speculators fp32": resaved("speculators", torch.float32),
    "prefixed": prefixed,
    "pickled": pickled,
    "sparse": sparse,
}
