"""Compiled kernels on disk, shared by every start of this user."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

CACHE_VARIABLE = "PACELINE_KERNEL_CACHE"


class CompileError(RuntimeError):
    """A kernel did not compile, or the compiler is not there."""


def cache_folder() -> Path:
    folder = os.environ.get(CACHE_VARIABLE)
    return Path(folder) if folder else Path.home() / ".cache" / "paceline" / "kernels"


def keep(file: Path, binary: bytes) -> None:
    """Written whole or not at all. A folder that cannot be written only costs the next start its time."""
    partial = file.with_suffix(f".{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(binary)
        partial.replace(file)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
