"""What is in the caches: models that paceline converted or described, and downloads from the Hugging Face Hub."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import FetchError, ModelError, ModelNotFound
from paceline.hub import default
from paceline.hub.cache import cache_folder
from paceline.hub.documents import read_document

DEFAULT_KIND, GGUF_KIND, HUB_KIND = "default model", "GGUF, converted", "Hugging Face Hub"
DESCRIBED_KIND = "tokenizer of a GGUF file"  # the weights stay where the user has them
GGUF_DEFAULT_KIND = "default model, GGUF"
GGUF_TAG = re.compile(r"(?:^|[-._])(I?Q\d\w*|BF16|F16|F32|MXFP4\w*)(?=$|[-._])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model that is on this machine.

    folder     the Hugging Face directory that is loaded
    root       what is removed with the model
    format     how its weights are stored: a dtype, a quantization method, or GGUF and its type
    last_used  seconds since 1970
    """

    name: str
    kind: str
    folder: Path
    root: Path
    size: int
    last_used: float
    format: str

    def remove(self) -> None:
        """Delete the model from its cache. Raises FetchError."""
        doomed = self.root.with_name(f".{self.root.name}.partial-removed")
        try:
            self.root.rename(doomed)  # at once: no other process finds half a model
            shutil.rmtree(doomed)
        except OSError as error:
            raise FetchError(f"cannot remove {self.root}: {error.strerror}") from error


def cached_models() -> list[CachedModel]:
    """Every model in the caches, the last used first."""
    return sorted([*_converted(), *_downloaded()], key=lambda model: -model.last_used)


def cached_model(name: str) -> CachedModel:
    """A model of the caches by its name; `default` is the embedded one. Raises ModelNotFound."""
    directory = default.DIRECTORY if name == "default" else name
    for model in cached_models():
        if model.name == directory:
            return model
    raise ModelNotFound(f"{name} is not in the cache; `paceline models list` shows what is")


def _converted() -> list[CachedModel]:
    root = cache_folder()
    folders = [path for path in root.iterdir() if not path.name.startswith(".")] if root.is_dir() else []
    kinds = ((folder, _kind(folder)) for folder in folders)
    return [_converted_model(folder, kind) for folder, kind in kinds if kind is not None]


def _kind(folder: Path) -> str | None:
    """What a directory of paceline's cache holds; None: nothing of a model."""
    if any(folder.glob("*.gguf")):
        return GGUF_DEFAULT_KIND if folder.name == default.GGUF_DIRECTORY else GGUF_KIND
    if (folder / "config.json").is_file():
        return DEFAULT_KIND if folder.name == default.DIRECTORY else GGUF_KIND
    return DESCRIBED_KIND if (folder / "sizes.json").is_file() else None


def _converted_model(folder: Path, kind: str) -> CachedModel:
    used = folder.stat().st_mtime
    return CachedModel(folder.name, kind, folder, folder, _size(folder), used, stored_format(folder))


def stored_format(folder: Path) -> str:
    """How the weights of a directory are stored."""
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf"))
    if files:
        return ", ".join(dict.fromkeys(gguf_format(file) for file in files))
    if not (folder / "config.json").is_file():
        tag = GGUF_TAG.search(folder.name)
        return f"GGUF {tag[1].upper()}" if tag else "GGUF"
    try:
        config = read_document(folder / "config.json", folder.name)
    except ModelError:
        return "not readable"
    stored = config.get("quantization_config") or {}
    dtype = config.get("dtype") or config.get("torch_dtype") or "not stated"
    return f"{stored['quant_method']}, {dtype}" if stored.get("quant_method") else str(dtype)


def gguf_format(file: str) -> str:
    """GGUF and the type in the name of a file, such as Q4_K_M."""
    tags = GGUF_TAG.findall(file.removesuffix(".gguf").replace("/", "-"))
    return f"GGUF {tags[-1].upper()}" if tags else "GGUF"


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _downloaded() -> list[CachedModel]:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    models = []
    for repository in repositories:
        revisions = sorted(repository.revisions, key=lambda revision: revision.last_modified)
        if repository.repo_type == "model" and revisions:
            path, used = Path(repository.repo_path), repository.last_accessed
            folder = Path(revisions[-1].snapshot_path)
            size, stored = repository.size_on_disk, stored_format(folder)
            models.append(CachedModel(repository.repo_id, HUB_KIND, folder, path, size, used, stored))
    return models
