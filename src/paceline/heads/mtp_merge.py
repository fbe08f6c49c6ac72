"""Writes a copy of a target's checkpoint with an MTP head inside, as its family publishes both.

Files of the target are linked where the file system can, else copied; only a file that holds an earlier head is
rewritten without it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from paceline.heads.mtp import MtpHead, family_layout, named_tensors
from paceline.heads.mtp_files import HeadTensors
from paceline.heads.mtp_names import find_names
from paceline.hub.documents import read_document
from paceline.hub.shards import INDEXES, weight_files

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")  # what configs call the number of layers of a head
USUAL_COUNT = COUNTS[1]


def write_merged(head: MtpHead, target: Path, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write the target and its head into a directory. An earlier head of the target is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in target.iterdir():
        if path.is_file() and path.suffix not in WEIGHTS and path.name not in INDEXES:
            shutil.copy(path, folder / path.name)
    shards = weight_files(target)
    old = _names_of_head(target)
    names = {shard: f"model-{index:05}-of-{len(shards) + 1:05}.safetensors" for index, shard in enumerate(shards, 1)}
    weight_map: dict[str, str] = {}
    for shard, name in names.items():
        weight_map |= dict.fromkeys(_copy_without(shard, folder / name, old), name)
    last = f"model-{len(shards) + 1:05}-of-{len(shards) + 1:05}.safetensors"
    weight_map |= dict.fromkeys(_write_head(head, folder / last, dtype), last)
    (folder / INDEXES[0]).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1) + "\n")
    config = _with_count(target, head.num_modules)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _names_of_head(target: Path) -> frozenset[str]:
    """The tensors of the head that a target already has."""
    document = read_document(target / "config.json", target.name)
    text = document.get("text_config") or document
    with ExitStack() as stack:
        names = find_names(HeadTensors(target, stack, torch.float32).names(), int(text["num_hidden_layers"]))
    return frozenset() if names is None else frozenset(names.stored.values())


def _copy_without(shard: Path, copy: Path, left_out: Collection[str]) -> list[str]:
    """Copy a file of weights but for these tensors. Returns the names it holds."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    copy.unlink(missing_ok=True)
    with safe_open(shard, framework="pt") as file:
        names = [name for name in file.keys() if name not in left_out]  # noqa: SIM118  (not a mapping)
        if len(names) < len(list(file.keys())):
            save_file({name: file.get_tensor(name) for name in names}, copy, metadata={"format": "pt"})
            return names
    try:
        os.link(shard.resolve(), copy)
    except OSError:  # another file system, or one without links
        shutil.copy(shard, copy)
    return names


def _write_head(head: MtpHead, path: Path, dtype: torch.dtype | None) -> list[str]:
    from safetensors.torch import save_file

    named = named_tensors(head, family_layout(head.config), dtype)
    tensors = {name: value.detach().cpu().contiguous() for name, value in named.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return list(tensors)


def _with_count(target: Path, num_modules: int) -> dict[str, Any]:
    """The config, which says that there is a head."""
    document = read_document(target / "config.json", target.name)
    text = document.get("text_config", document)
    text[next((key for key in COUNTS if key in text), USUAL_COUNT)] = num_modules
    return document
