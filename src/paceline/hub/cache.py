"""The cache folder of obtained models, safe for several processes at once.

A directory appears under its final name only when it is complete: it is filled under a temporary name while a lock
is held, then renamed. An interrupted process leaves nothing that a later start could mistake for a model.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from paceline.errors import FetchError


def cache_folder() -> Path:
    """PACELINE_CACHE, or `paceline` in the user's cache folder."""
    folder = os.environ.get("PACELINE_CACHE")
    if folder:
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"


def cached_directory(name: str, fill: Callable[[Path], None]) -> Path:
    """The directory `name` of the cache, filled by `fill(folder)` if it is not there yet.

    Of two processes at once the first fills it; the other waits for the lock and uses the result.
    """
    root = cache_folder()
    final = root / name
    if final.is_dir():
        return final
    _make_folder(root)
    with FileLock(root / f".{name}.lock"):
        if not final.is_dir():
            _fill_atomically(root, final, fill)
    return final


def _fill_atomically(root: Path, final: Path, fill: Callable[[Path], None]) -> None:
    # The lock is held, so anything under the temporary prefix comes from a process that died.
    prefix = f".{final.name}.partial-"
    for leftover in root.glob(prefix + "*"):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(dir=root, prefix=prefix))
    try:
        fill(partial)
        partial.chmod(0o755)
        partial.rename(final)
    finally:  # also on Ctrl-C
        shutil.rmtree(partial, ignore_errors=True)


def _make_folder(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FetchError(f"cannot write to the cache folder {root}: {error}. Set PACELINE_CACHE to another") from error
