"""Items made in a thread while the consumer works: a device must not wait for a tokenizer."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Item = TypeVar("Item")


class PrefetchQueue(Generic[Item]):
    """Items that one thread puts in and another takes out. An error of the producer reaches the consumer."""

    def __init__(self, size: int) -> None:
        self._ready: queue.Queue[Item | Exception] = queue.Queue(size)
        self._closed = threading.Event()

    def fill(self, items: Iterator[Item]) -> None:
        try:
            for item in items:
                if not self._put(item):
                    return
        except Exception as error:  # carried over to the consumer's thread
            self._put(error)

    def _put(self, item: Item | Exception) -> bool:
        """False once the queue is closed."""
        while not self._closed.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put(item, timeout=0.2)
                return True
        return False

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        item = self._ready.get()
        if isinstance(item, Exception):
            raise item
        return item

    def close(self) -> None:
        self._closed.set()


@contextmanager
def prefetched(items: Iterator[Item], size: int) -> Iterator[Iterator[Item]]:
    """The same endless items, made ahead of time in a thread that ends with the block."""
    prefetch_queue: PrefetchQueue[Item] = PrefetchQueue(size)
    threading.Thread(target=prefetch_queue.fill, args=(items,), daemon=True).start()
    try:
        yield prefetch_queue
    finally:
        prefetch_queue.close()
