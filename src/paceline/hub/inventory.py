"""What is in the caches: models that paceline converted, and models that were downloaded from the Hugging Face Hub."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import FetchError, ModelNotFound
from paceline.hub import default
from paceline.hub.cache import cache_folder

DEFAULT_KIND, GGUF_KIND, HUB_KIND = "default model", "GGUF, converted", "Hugging Face Hub"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model that is on this machine.

    folder     the Hugging Face directory that is loaded
    root       what is removed with the model
    last_used  seconds since 1970
    """

    name: str
    kind: str
    folder: Path
    root: Path
    size: int
    last_used: float

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
    return [_converted_model(folder) for folder in folders if (folder / "config.json").is_file()]


def _converted_model(folder: Path) -> CachedModel:
    kind = DEFAULT_KIND if folder.name == default.DIRECTORY else GGUF_KIND
    return CachedModel(folder.name, kind, folder, folder, _size(folder), folder.stat().st_mtime)


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
            models.append(CachedModel(repository.repo_id, HUB_KIND, folder, path, repository.size_on_disk, used))
    return models
