"""The notice that a model is loading. Importing torch is part of it, so it begins before the command does."""

from __future__ import annotations

from paceline.device.garbage import PAUSES, FrozenObjects
from paceline.hub.progress import LoadNotice

COMMANDS = frozenset({"demo", "generate", "chat", "serve", "bench", "tune", "train"})  # those that always load a model
_notices: list[LoadNotice] = []  # of the command under way: one at most
_imported: list[FrozenObjects] = []  # likewise


def begin(model: str | None) -> None:
    """Say that a model is loading as soon as that takes long, until `done`. Beginning twice, or with none, is harmless.

    No garbage is looked for until `done` (device/garbage.py).
    """
    if model is not None and not _notices:
        PAUSES.begin()
        _notices.append(LoadNotice(f"loading {model}"))
        _notices[0].start()


def imported() -> None:
    """Modules stay until the process ends: neither the first collection after `done` nor the one at exit visits them.

    Called before a model is opened, and only the first call counts: a model that is closed can still be collected.
    """
    if not _imported:
        _imported.append(FrozenObjects())


def done() -> None:
    """The model is loaded, or will not be. Harmless where nothing is loading."""
    while _notices:
        _notices.pop().stop()
        PAUSES.end()


def ended() -> None:
    """The command has ended and the process goes on: what was imported may become garbage."""
    while _imported:
        _imported.pop().release()
