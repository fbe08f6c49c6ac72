"""Functions in short-lived threads, so that OpenMP keeps no idle team for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def run_in_load_thread(work: Callable[[], Result]) -> Result:
    """Return what `work` returns, or raise what it raises; its thread has ended by then.

    OpenMP keeps a team for every thread that has computed something large. With more teams than cores no team spins
    between two operations, and waking one costs a batch an eighth of its speed (docs/log.md). A model that a worker
    thread will own is therefore loaded here and not in the main thread, which stays.

    An interrupt is not delayed: the thread is a daemon.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised again in the calling thread, whatever it is
            future.set_exception(error)

    thread = threading.Thread(target=run, name="paceline-load", daemon=True)
    thread.start()
    try:
        return future.result()
    finally:
        if future.done():
            thread.join()


def run_beside(work: Callable[[], None]) -> None:
    """Do something small while loading goes on; nothing waits for it."""
    threading.Thread(target=work, name="paceline-beside", daemon=True).start()
