"""Weights that were converted at load, kept on disk: the next start reads them instead of converting again.

One file a model, format and device, in the folder `quantized` of the cache. Its name says what it was made of (files,
sizes and times of the model, the format, the version of paceline), so a changed model never meets old weights. It
appears under its name only when it is whole. The folder holds at most MAX_BYTES: what was used longest ago goes first.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from paceline import __version__
from paceline.device.properties import on_host
from paceline.hub.cache import cache_folder
from paceline.hub.shards import weight_files
from paceline.layers.cpu_kernels import library
from paceline.layers.gemm_types import Linear, SavedWeight
from paceline.quantization.blocked import BlockedLinear
from paceline.quantization.packed import PackedLinear

LOG = logging.getLogger("paceline")
LAYOUT = 2  # part of the key: files of an older layout are not read again
FOLDER = "quantized"
MIN_BYTES = 16 << 20  # smaller models are converted as fast as they are read
MAX_BYTES = 64 << 30
READERS: Mapping[str, Callable[[SavedWeight], Linear]] = {
    "blocked": BlockedLinear.restored,
    "packed": PackedLinear.restored,
}


class ConvertedWeights:
    """The converted linear layers of one model: those of an earlier start, or those that this one converts."""

    def __init__(self, path: Path, device: str) -> None:
        self._path = path
        self._saved = _opened(path, device)
        self._added: dict[str, SavedWeight] = {}
        self._complete = True

    def get(self, key: str) -> Linear | None:
        """A layer of an earlier start; None: it has to be converted."""
        read = self._saved.get(key)
        return None if read is None else READERS[(saved := read()).kind](saved)

    def add(self, key: str, linear: Linear) -> None:
        """A layer that was converted now."""
        saved = linear.saved()
        self._complete = self._complete and saved is not None
        if saved is not None:
            self._added[key] = saved

    def save(self) -> None:
        """Keep what was converted. A cache that is full or cannot be written costs the next start its time, no more."""
        size = sum(tensor.nbytes for saved in self._added.values() for tensor in saved.tensors.values())
        if self._saved or not self._complete or size < MIN_BYTES:
            return
        try:
            folder = self._path.parent
            folder.mkdir(parents=True, exist_ok=True)
            if size > MAX_BYTES or size > shutil.disk_usage(folder).free // 2:
                LOG.info("the converted weights are not kept: there is no room for them in %s", folder)
                return
            _make_room(folder, MAX_BYTES - size)
            _write(self._path, self._added)
        except (OSError, SafetensorError) as error:
            LOG.info("the converted weights are not kept: %s", error)


def converted_weights(folder: Path, weight_format: str, dtype: torch.dtype, device: str) -> ConvertedWeights:
    """Those of a model directory."""
    identity: list[object] = [LAYOUT, __version__, weight_format, str(dtype), on_host(device)]
    if on_host(device):
        identity += [platform.machine(), library() is not None]
    for file in (*weight_files(folder), folder / "config.json"):
        status = file.stat()
        identity += [str(file.resolve()), status.st_size, status.st_mtime_ns]
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    return ConvertedWeights(cache_folder() / FOLDER / f"{weight_format}-{key}.safetensors", device)


def _opened(path: Path, device: str) -> Mapping[str, Callable[[], SavedWeight]]:
    """What is in a file, by key, each to be read when it is asked for; nothing where no file can be read."""
    if not path.is_file():
        return {}
    try:
        file = safe_open(path, framework="pt", device=device).__enter__()  # open until the last layer is read
        described = {key: json.loads(text) for key, text in file.metadata().items()}
    except (SafetensorError, OSError, ValueError, AttributeError) as error:
        LOG.warning("the converted weights in %s cannot be read and are made again: %s", path, error)
        return {}
    with suppress(OSError):
        os.utime(path)  # says when it was last used
    return {key: partial(_restored, key, described[key], file.get_tensor) for key in described}


def _restored(key: str, description: dict[str, Any], tensor: Callable[[str], Tensor]) -> SavedWeight:
    tensors = {name: tensor(f"{key}/{name}") for name in description["tensors"]}
    return SavedWeight(description["kind"], tensors, description["numbers"])


def _write(path: Path, weights: Mapping[str, SavedWeight]) -> None:
    tensors = {f"{key}/{name}": part for key, saved in weights.items() for name, part in saved.tensors.items()}
    described = {
        key: json.dumps({"kind": saved.kind, "tensors": list(saved.tensors), "numbers": saved.numbers})
        for key, saved in weights.items()
    }
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".partial-") as unfinished:
        file = Path(unfinished) / path.name
        save_file({name: part.cpu().contiguous() for name, part in tensors.items()}, file, metadata=described)
        file.replace(path)


def _make_room(folder: Path, limit: int) -> None:
    """Remove what was used longest ago until the rest takes no more than `limit` bytes."""
    files = sorted(folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime)
    total = sum(file.stat().st_size for file in files)
    for file in files:
        if total <= limit:
            return
        total -= file.stat().st_size
        file.unlink(missing_ok=True)
