"""The cache folder of obtained models, safe for several processes at once.

A directory appears under its final name only when it is complete: it is filled under a temporary name while a lock
is held, then renamed. An interrupted process leaves nothing that a later start could mistake for a model.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.errors import FetchError

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG)


def cache_folder() -> Path:
    """PACELINE_CACHE, or `paceline` in the user's cache folder."""
    folder = os.environ.get("PACELINE_CACHE")
    if folder:
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline"


def cached_directory(name: str, fill: Callable[[Path], None]) -> Path:
    """The directory `name` of the cache, filled by `fill(folder)` if it is not there yet.

    Of two processes at once the first fills it; the other waits for the lock and uses the result.
    Raises FetchError where the cache cannot be written or is full; nothing half made is left in it.
    """
    root = cache_folder()
    final = root / name
    if not final.is_dir():
        with _explained(root):
            _fill_locked(root, final, fill)
    _mark_used(final)
    return final


def _fill_locked(root: Path, final: Path, fill: Callable[[Path], None]) -> None:
    from filelock import FileLock  # a start that finds its model does not wait for this import

    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=root):
        pass  # a lock never gives up where no file can be made
    with FileLock(root / f".{final.name}.lock"):
        if not final.is_dir():
            _fill_atomically(root, final, fill)


def _mark_used(folder: Path) -> None:
    """The time of the directory says when the model was last used; a cache that is read-only keeps the old one."""
    with suppress(OSError):
        os.utime(folder)


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


@contextmanager
def _explained(root: Path) -> Iterator[None]:
    """What goes wrong while writing, in the user's words. safetensors has an error of its own for a full disk."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        raise cannot_write(root, error, "PACELINE_CACHE") from error


def cannot_write(root: Path, error: Exception, variable: str) -> FetchError:
    """A cache that is read-only or full. variable: the one of the environment that names another folder."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error).splitlines()[0]
    return FetchError(f"cannot write to the cache folder {root}: {reason}. Let {variable} name another, or make room")
