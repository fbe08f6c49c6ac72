"""Progress of slow work on stderr: a moving bar on a terminal, lines elsewhere.

stage    work of unknown length
track    a known number of items, with the time left
transfer a known number of bytes, from several threads, with the time left
LoadNotice  says that a model is loading, if that takes long
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")
SECONDS_BEFORE_NOTICE = 2.0
SECONDS_BETWEEN_LINES = 10.0
UNITS = ("B", "kB", "MB", "GB", "TB")
Advance = Callable[[int], None]


@contextmanager
def stage(label: str) -> Iterator[None]:
    """Show a moving bar and the time while the block runs."""
    if not sys.stderr.isatty():
        _print_line(label)
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(label, total=None)
        yield


def track(items: Iterable[Item], label: str, total: int) -> Iterator[Item]:
    """Pass items through and show how many are done and the time left. total: at most so many."""
    if not sys.stderr.isatty():
        yield from _track_in_lines(items, label, total)
        return
    from rich.console import Console
    from rich.progress import track as rich_track

    yield from rich_track(items, description=label, total=total, console=Console(stderr=True), transient=True)


def _track_in_lines(items: Iterable[Item], label: str, total: int) -> Iterator[Item]:
    _print_line(label)
    started = last_line = time.monotonic()
    for done, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        if now - last_line >= SECONDS_BETWEEN_LINES and done < total:
            last_line = now
            left = clock((now - started) * (total - done) / done)
            _print_line(f"{label}: {done} of {total}, {left} left")


@contextmanager
def transfer(label: str, total: int, done: int) -> Iterator[Advance]:
    """Show the bytes of a download. done: those of an earlier try. Yields what is told of every further piece."""
    if not sys.stderr.isatty():
        lines = _TransferLines(label, total, done)
        yield lines.advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total, completed=done)
        yield lambda size: progress.advance(task, size)


class _TransferLines:
    """A line at the start, and one from time to time."""

    def __init__(self, label: str, total: int, done: int) -> None:
        self._label, self._total, self._earlier, self._done = label, total, done, done
        self._started = self._last_line = time.monotonic()
        self._lock = threading.Lock()
        resumed = f", {size_text(done)} of it here already" if done else ""
        _print_line(f"{label} ({size_text(total)}{resumed})")

    def advance(self, size: int) -> None:
        with self._lock:
            self._done += size
            now = time.monotonic()
            if now - self._last_line >= SECONDS_BETWEEN_LINES:
                self._last_line = now
                _print_line(f"{self._label}: {size_text(self._done)} of {size_text(self._total)}, {self._left(now)}")

    def _left(self, now: float) -> str:
        rate = max(self._done - self._earlier, 1) / (now - self._started)
        return f"{clock((self._total - self._done) / rate)} left"


def size_text(size: int) -> str:
    """A number of bytes for people."""
    amount, power = float(size), 0
    while amount >= 1000 and power < len(UNITS) - 1:
        amount, power = amount / 1000, power + 1
    return f"{amount:.0f} {UNITS[power]}" if power == 0 or amount >= 100 else f"{amount:.1f} {UNITS[power]}"


def clock(seconds: float) -> str:
    """Seconds as 0:07 or 1:02:03; what is over already is 0:00."""
    minutes, rest = divmod(max(0, int(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class LoadNotice:
    """A line on stderr once loading has taken two seconds, and from time to time after that, until `stop`."""

    def __init__(self, label: str) -> None:
        self._label, self._stopped = label, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="paceline-load-notice", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Say nothing from now on. Stopping twice is harmless."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        started, wait = time.monotonic(), SECONDS_BEFORE_NOTICE
        while not self._stopped.wait(wait):
            wait = SECONDS_BETWEEN_LINES
            elapsed = time.monotonic() - started
            _print_line(f"{self._label} …" if elapsed < wait else f"{self._label}: {clock(elapsed)} so far")


def _print_line(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)
