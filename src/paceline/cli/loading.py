"""The notice that a model is loading. Importing torch is part of it, so it begins before the command does."""

from __future__ import annotations

import gc

from paceline.hub.progress import LoadNotice

COMMANDS = frozenset({"demo", "generate", "chat", "serve", "bench", "tune", "train"})  # those that always load a model
_notices: list[LoadNotice] = []  # of the command under way: one at most


def begin(model: str | None) -> None:
    """Say that a model is loading as soon as that takes long, until `done`. Beginning twice, or with none, is harmless.

    Imports and loading make hundreds of thousands of objects and no garbage: looking for it is put off until `done`.
    """
    if model is not None and not _notices:
        gc.disable()
        _notices.append(LoadNotice(f"loading {model}"))
        _notices[0].start()


def imported() -> None:
    """Modules stay until the process ends: neither the first collection after `done` nor the one at exit visits them.

    Called before a model is opened, and only the first call counts: a model that is closed can still be collected.
    """
    if not gc.get_freeze_count():
        gc.freeze()


def done() -> None:
    """The model is loaded, or will not be. Harmless where nothing is loading."""
    while _notices:
        _notices.pop().stop()
        gc.enable()
