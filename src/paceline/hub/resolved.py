"""What transformers made of a model's files, kept on disk: a later start reads it and does not import transformers.

One file a model and kind, or a pair of models, in the folder `resolved` of the cache. Its name is a hash of the files
it was made of and of the versions that made it, so changed files or another transformers never meet what was kept. It
appears under its name only when it is whole. A cache that cannot be written or read costs a start its time, no more.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from paceline.hub.cache import cache_folder

LOG = logging.getLogger("paceline")
LAYOUT = 1  # part of the key: files of an older layout are not read again
FOLDER = "resolved"
MAKERS = ("transformers", "tokenizers", "jinja2", "mistral-common")  # what decides what becomes of files
MAX_FILES = 64  # what was used longest ago goes first


def resolved_file(kind: str, sources: Iterable[Path]) -> Path | None:
    """Where it is kept what transformers made of these files. None: nothing can be kept of them."""
    if any("dev" in name for name in versions()):  # such a version stays the same when its code changes
        return None
    digest = hashlib.sha256(repr((LAYOUT, kind, versions())).encode())
    try:
        for path in sources:
            content = path.read_bytes()
            digest.update(repr((path.name, len(content))).encode() + content)
    except OSError:
        return None
    return cache_folder() / FOLDER / f"{kind}-{digest.hexdigest()[:32]}.json"


def resolved_pair(kind: str, first: Path, second: Path) -> Path:
    """Where it is kept what was found of two models together: by where each one's own is kept."""
    digest = hashlib.sha256(repr((LAYOUT, kind, first.name, second.name)).encode())
    return cache_folder() / FOLDER / f"{kind}-{digest.hexdigest()[:32]}.json"


def read_resolved(path: Path) -> str | None:
    """What an earlier start kept; None: nothing."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    with suppress(OSError):
        os.utime(path)
    return text


def keep_resolved(path: Path, text: str) -> None:
    """Keep it for later starts."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as partial:
            try:
                partial.write(text)
                partial.close()
                Path(partial.name).chmod(0o644)  # a cache may serve several users
                os.replace(partial.name, path)
            finally:
                Path(partial.name).unlink(missing_ok=True)
        _make_room(path.parent)
    except OSError as error:
        LOG.debug("what transformers made of the model is not kept: %s", error)


def _make_room(folder: Path) -> None:
    files = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files[MAX_FILES:]:
        path.unlink(missing_ok=True)


@cache
def versions() -> tuple[str, ...]:
    """Of the makers; empty for one that is not installed."""
    return tuple(map(_version, MAKERS))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
