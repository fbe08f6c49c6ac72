"""Garbage collection while modules are imported, a model is loaded and graphs are captured. Imports no torch.

Imports and loading make hundreds of thousands of objects and next to no garbage, and every collection on the way visits
all of them. The collector belongs to the program: whatever is switched off here is switched on again only where it was
on, and what the program has frozen itself stays frozen.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class CollectionPauses:
    """Pauses that are under way, of all threads: the last one to end gives the program its collector back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._was_enabled = False

    def begin(self) -> None:
        with self._lock:
            if not self._count:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._count += 1

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count and self._was_enabled:
                gc.enable()


PAUSES = CollectionPauses()


class FrozenObjects:
    """All objects of this moment, frozen: collections do not visit them. None where something is frozen already: only
    all frozen objects can be released, and those of the program are not ours.

    Python counts frozen objects one by one, 80 ms for those of a large program. So they are counted only until some
    were there that are not ours, and never while ours are.
    """

    _lock = threading.Lock()
    _ours_are_frozen = False
    _program_froze = False

    def __init__(self) -> None:
        with self._lock:
            self._is_owner = not self._something_is_frozen()
            if self._is_owner:
                gc.freeze()
                FrozenObjects._ours_are_frozen = True

    @classmethod
    def _something_is_frozen(cls) -> bool:
        if not cls._ours_are_frozen and not cls._program_froze:
            cls._program_froze = gc.get_freeze_count() > 0
        return cls._ours_are_frozen or cls._program_froze

    def release(self) -> None:
        """Let them become garbage again. Harmless the second time."""
        with self._lock:
            if self._is_owner:
                gc.unfreeze()
                self._is_owner = FrozenObjects._ours_are_frozen = False


@contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Collect no garbage inside the block, in no thread."""
    PAUSES.begin()
    try:
        yield
    finally:
        PAUSES.end()


@contextmanager
def while_importing() -> Iterator[None]:
    """Around imports. What they made counts as old afterwards: else the next collection would visit it after all."""
    with garbage_collection_paused():
        yield
        FrozenObjects().release()


class ModelLoads:
    """Around the loading of a model, whose graphs are captured inside."""

    def __init__(self) -> None:
        self._num_begun = 0

    @contextmanager
    def under_way(self, *, may_hold_memory: bool = False) -> Iterator[None]:
        """may_hold_memory: garbage of the program may be a model. So may that of an earlier load: it goes first, or two
        models would have to fit."""
        with garbage_collection_paused():
            if may_hold_memory or self._num_begun:
                gc.collect()
            self._num_begun += 1
            imported = FrozenObjects()
            try:
                yield
            finally:
                imported.release()


MODEL_LOADS = ModelLoads()
