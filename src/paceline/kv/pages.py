"""Pages of the cache: who holds which, how many are free.

A text's tokens lie in pages of `size` tokens. A text gets neighbouring pages as long as there are any: looking back
over neighbours copies nothing. Pages may be held by several texts at once: a shared prompt is stored once. A page held
by more than one is never written; whoever must write into it first gets a copy (see `writable`).
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
        self.free = pages
        self._holders = [0] * pages
        self._tables: dict[Hashable, list[int]] = {}

    @property
    def used(self) -> int:
        return self.pages - self.free

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
        if missing > self.free:
            raise OutOfMemory(f"the cache has {self.free} free pages of {self.size} and needs {missing}: {KNOB}")
        for _ in range(missing):
            table.append(self._take(table[-1] + 1 if table else None))
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
                if not self.free:
                    raise OutOfMemory(f"the cache has no free page left: {KNOB}")
                fresh = self._take(table[place - 1] + 1 if place else None)
                self._drop(page)
                table[place] = fresh
                copies.append(Copy(page, fresh))
        return copies

    def _take(self, wanted: int | None) -> int:
        """The page wanted, if it is free, or one with much room behind it. There must be a free one."""
        page = wanted if wanted is not None and self._is_free(wanted) else self._roomy()
        self._holders[page] = 1
        self.free -= 1
        return page

    def _is_free(self, page: int) -> bool:
        return page < self.pages and self._holders[page] == 0

    def _roomy(self) -> int:
        """The middle of the longest run of free pages: whoever lies before it keeps room to grow, and so does the new
        one. At the very beginning of the pool nobody lies before it."""
        best, length, start = 0, 0, 0
        for page in range(self.pages + 1):
            if page < self.pages and self._holders[page] == 0:
                continue
            if page - start > length:
                best, length = start, page - start
            start = page + 1
        return best if best == 0 else best + length // 2

    def _drop(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page] == 0:
            self.free += 1
