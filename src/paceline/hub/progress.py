"""Progress of slow work on stderr: a moving bar on a terminal, one line elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Item = TypeVar("Item")


@contextmanager
def stage(label: str) -> Iterator[None]:
    """Show a moving bar and the time while the block runs."""
    if not sys.stderr.isatty():
        print(f"paceline: {label}", file=sys.stderr, flush=True)
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task(label, total=None)
        yield


def track(items: Iterable[Item], label: str, total: int) -> Iterator[Item]:
    """Pass items through and show how many are done."""
    if not sys.stderr.isatty():
        print(f"paceline: {label}", file=sys.stderr, flush=True)
        yield from items
        return
    from rich.console import Console
    from rich.progress import track as rich_track

    yield from rich_track(items, description=label, total=total, console=Console(stderr=True), transient=True)
