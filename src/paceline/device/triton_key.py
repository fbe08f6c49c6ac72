"""Triton's key, computed before the first launch waits for it.

Triton looks up compiled kernels by a hash of itself, and its library has 500 MB. Hashing needs no Python, so a thread
does it while weights are read.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

from paceline.device.load_thread import run_beside

HOMES = ("triton.runtime.cache", "triton.compiler.compiler")  # of the function, in one version of Triton or another
FUNCTION = "triton_key"


def compute_triton_key_beside() -> None:
    """Begin, unless the key is known or under way. Nothing happens where this Triton has no such function.

    Its result is cached without a lock: until it is there, a launch would compute it a second time, so it waits.
    """
    home = _home()
    compute: Any = getattr(home, FUNCTION, None)
    cache_info = getattr(compute, "cache_info", None)  # the one that waits has none
    if home is None or cache_info is None or cache_info().currsize:
        return
    is_done = threading.Event()

    def awaited() -> Any:
        is_done.wait()
        return compute()

    def work() -> None:
        with suppress(Exception):  # the first launch meets it too, and says so
            compute()
        setattr(home, FUNCTION, compute)
        is_done.set()

    setattr(home, FUNCTION, awaited)
    run_beside(work)


def _home() -> ModuleType | None:
    """The module that launches call it in."""
    for name in HOMES:
        with suppress(ImportError):
            module = import_module(name)
            if hasattr(module, FUNCTION):
                return module
    return None
