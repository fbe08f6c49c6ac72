"""Ctrl-C in a command that owns its process: never lost, never a crash.

Some libraries swallow a KeyboardInterrupt that reaches them while they are imported, so it is written down too: a
command that has loaded its model calls `check`. A thread may still be inside torch or a tokenizer; the interpreter
would abort if it ended under it, so `leave` ends the process instead.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

_pressed = threading.Event()


def watch() -> None:
    """Write interrupts down from now on. Only the main thread may ask for it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a parent may have chosen to ignore it
        signal.signal(signal.SIGINT, _on_interrupt)


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    _pressed.set()
    raise KeyboardInterrupt


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
        except OSError:  # nothing reads it any more
            pass
    os._exit(status)
