"""Pages of the cache: who holds which, how many are free.

A text's tokens lie in pages of `size` tokens. Pages may be held by several texts at once: a shared prompt is stored
once. A page held by more than one is never written; whoever must write into it first gets a copy (see `writable`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from paceline.errors import OutOfMemory

KNOB = "give the cache more pages (--cache-tokens), run fewer texts at a time, or shorten them"


@dataclass(frozen=True, slots=True)
class Copy:
    """A page whose content must be copied before the holder may write."""

    source: int
    target: int


class PagePool:
    """A fixed number of pages and the lists of who holds them."""

    def __init__(self, pages: int, size: int) -> None:
        self.pages, self.size = pages, size
        # Taken from the end, so that a pool used by one text hands out neighbouring pages in rising order.
        self._free = list(range(pages - 1, -1, -1))
        self._holders = [0] * pages
        self._tables: dict[Hashable, list[int]] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.pages - len(self._free)

    def needed(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.size)

    def table(self, holder: Hashable) -> list[int]:
        """The holder's pages in the order of its tokens. Not a copy: do not change it."""
        return self._tables.setdefault(holder, [])

    def grow(self, holder: Hashable, tokens: int) -> bool:
        """Make sure the holder has pages for this many tokens; True if any were added.

        Raises OutOfMemory, and then nothing has changed.
        """
        table = self.table(holder)
        missing = self.needed(tokens) - len(table)
        if missing > len(self._free):
            raise OutOfMemory(f"the cache has {len(self._free)} free pages of {self.size} and needs {missing}: {KNOB}")
        for _ in range(missing):
            page = self._free.pop()
            self._holders[page] = 1
            table.append(page)
        return missing > 0

    def shrink(self, holder: Hashable, tokens: int) -> None:
        """Give back pages past this many tokens."""
        table = self.table(holder)
        keep = self.needed(tokens)
        for page in reversed(table[keep:]):
            self._drop(page)
        del table[keep:]

    def release(self, holder: Hashable) -> None:
        """Give all pages of a holder back. Releasing twice is harmless."""
        for page in reversed(self._tables.pop(holder, [])):
            self._drop(page)

    def share(self, source: Hashable, target: Hashable, tokens: int) -> None:
        """`target`, which holds nothing yet, also holds the source's pages for its first `tokens` tokens."""
        pages = self.table(source)[: self.needed(tokens)]
        for page in pages:
            self._holders[page] += 1
        self._tables[target] = list(pages)

    def writable(self, holder: Hashable, start: int, end: int) -> list[Copy]:
        """Make the holder the only one of the pages of tokens start to end; returns what must be copied for that."""
        table, copies = self.table(holder), []
        for place in range(start // self.size, min(self.needed(end), len(table))):
            page = table[place]
            if self._holders[page] > 1:
                if not self._free:
                    raise OutOfMemory(f"the cache has no free page left: {KNOB}")
                fresh = self._free.pop()
                self._holders[fresh] = 1
                self._drop(page)
                table[place] = fresh
                copies.append(Copy(page, fresh))
        return copies

    def _drop(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page] == 0:
            self._free.append(page)
