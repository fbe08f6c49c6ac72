"""Work in a thread that ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Made = TypeVar("Made")


def run_in_load_thread(work: Callable[[], Made]) -> Made:
    """What `work` returns or raises, done in a thread that is gone afterwards.

    OpenMP keeps a team for every thread that has computed something large. With more of them than cores no team waits
    awake between two operations any more, and waking costs a batch an eighth of its speed (docs/log.md). So a model
    that a worker thread will own is loaded here, not in the main thread, which stays.

    An interrupt is not held up: the thread is a daemon.
    """
    made: Future[Made] = Future()

    def run() -> None:
        try:
            made.set_result(work())
        except BaseException as error:  # handed to whoever waits, whatever it is
            made.set_exception(error)

    thread = threading.Thread(target=run, name="paceline-apart", daemon=True)
    thread.start()
    try:
        return made.result()
    finally:
        if made.done():
            thread.join()
