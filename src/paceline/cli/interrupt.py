"""Ctrl-C in a command that owns its process: never lost, never a crash.

No exception is raised into an import: torch's C++ initialisation aborts on one, and others swallow it or leave half a
module behind. The process ends at once there instead; an import holds nothing that must be put away. Libraries swallow
a KeyboardInterrupt elsewhere as well, so it is written down too: a command that has loaded its model calls `check`.
A thread may still be inside torch or a tokenizer; the interpreter would abort if it ended under it, so `leave` ends the
process instead.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
STDERR = 2
IMPORTING = "<frozen importlib._bootstrap"  # the file name of Python's own import functions begins like this

_pressed = threading.Event()


def watch() -> None:
    """Write interrupts down from now on. Only the main thread may ask for it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a parent may have chosen to ignore it
        signal.signal(signal.SIGINT, _on_interrupt)


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    _pressed.set()
    if is_importing(frame):
        os.write(STDERR, b"\n")  # not print(), which may be what was interrupted
        leave(INTERRUPTED)
    raise KeyboardInterrupt


def is_importing(frame: FrameType | None) -> bool:
    """Whether this frame was called, directly or not, by an import."""
    while frame is not None:
        if frame.f_code.co_filename.startswith(IMPORTING):
            return True
        frame = frame.f_back
    return False


def check() -> None:
    """Raise KeyboardInterrupt where one was swallowed."""
    if _pressed.is_set():
        raise KeyboardInterrupt


def pressed() -> bool:
    """Whether there was an interrupt that nothing has answered yet."""
    return _pressed.is_set()


def answered() -> None:
    """The interrupt was meant for what has just ended, or came before what begins now."""
    _pressed.clear()


def leave(status: int) -> NoReturn:
    """End the process at once, whatever its threads do. What was printed is written."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, RuntimeError):  # nothing reads it any more, or a write to it was interrupted
            pass
    os._exit(status)
