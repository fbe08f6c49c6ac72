"""Where a head lies, and its corrected copy."""

from __future__ import annotations

import shutil
from pathlib import Path

from paceline.errors import ModelNotFound, OptionError
from paceline.heads.checkpoint import INDEX, PICKLED_FILES, SAFE_FILES, Checkpoint, write_checkpoint
from paceline.heads.shipped import HERE, shipped_head, shipped_heads
from paceline.hub import DEFAULT, locate
from paceline.hub.default import DIRECTORY

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


def head_folder(name: str, model: str) -> Path:
    """A directory, a Hub id, or the method of a head that comes with paceline. Raises ModelNotFound."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name in shipped_heads():
        return HERE / name
    shipped = shipped_head(name, DIRECTORY if model == DEFAULT else Path(model).name)
    if shipped is None and name in {shipped_name.partition("-")[0] for shipped_name in shipped_heads()}:
        raise ModelNotFound(f"no {name} head comes with paceline for {model}; name the directory or Hub id of one")
    return shipped or locate(name).folder


def check_empty(folder: Path) -> None:
    """Raise OptionError where a corrected copy would write over something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OptionError(f"{folder} exists already; name a new directory for the corrected copy")


def write_copy(original: Checkpoint, corrected: Checkpoint, folder: Path) -> None:
    """The corrected files, and whatever else the head's directory holds."""
    check_empty(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for path in original.folder.iterdir():
        if path.is_file() and path.name not in ("config.json", INDEX) and path.suffix not in WEIGHT_SUFFIXES:
            shutil.copyfile(path, folder / path.name)
    write_checkpoint(folder, corrected.config, corrected.tensors, _weights_name(original.folder))


def _weights_name(folder: Path) -> str:
    """The file the weights are written to: its own name, as safetensors."""
    present = next((name for name in (*SAFE_FILES, *PICKLED_FILES) if (folder / name).is_file()), SAFE_FILES[0])
    return SAFE_FILES[1] if present in (SAFE_FILES[1], PICKLED_FILES[1]) else SAFE_FILES[0]
