"""Pages and slots: who may remember how much, and whose beginning is already there.

Every text is charged for all its tokens, also for those it shares: a runner may share or copy, and the books must hold
either way. A finished text stays as a resident, so that the next turn of its conversation, or another text with the
same beginning, need not be read again; residents go, oldest first, as soon as their pages are needed.
"""

from __future__ import annotations

from paceline.core.protocols import Runner, Slot
from paceline.core.sequence import Sequence
from paceline.errors import OutOfMemory
from paceline.kv.pages import PagePool
from paceline.kv.prefixes import Match, PrefixIndex


class Memory:
    """The cache of one runner, shared out among texts."""

    def __init__(self, target: Runner, tokens: int, page: int, residents: int, spare: int = 0) -> None:
        """spare: tokens of the runner's room that are promised to nobody; probes of a tree ride along in them."""
        self._target = target
        room = target.room()
        # A page more would be a promise the runner cannot keep.
        self.pool = PagePool(max(1, min(tokens, room - min(spare, room // 4)) // page), page)
        self._index = PrefixIndex(page)
        self._slots: dict[int, Slot] = {}  # of everyone in the index, running or resident
        self._residents: set[int] = set()
        self._most = residents
        self.cached_pages = 0  # of residents: given back when asked for
        self.hits = 0  # texts that found a beginning
        self.hit_tokens = 0  # tokens they did not have to read

    @property
    def capacity(self) -> int:
        """Tokens that fit if one text has everything to itself."""
        return self.pool.pages * self.pool.size

    @property
    def keeps(self) -> bool:
        """Whether texts that are over stay for a while."""
        return self._most > 0

    # --- texts --------------------------------------------------------------------------------------------------------

    def admit(self, text: Sequence) -> bool:
        """Open the text's slot, with as much of its beginning as someone remembers. False: there is no room now."""
        found = self._useful(text)
        if found is not None:
            self._index.touch(found.holder)  # so that making room takes others first
        if not self.reserve(text, len(text.ids)) or not self.fits(len(text.ids)):
            self.pool.release(text.number)
            return False
        text.slot = self._begin(found)
        text.reused = text.slot.length
        return True

    def known(self, text: Sequence) -> int:
        """How many of the text's first tokens need not be read."""
        found = self._useful(text)
        return found.length if found is not None else 0

    def reserve(self, text: Sequence, tokens: int) -> bool:
        """Pages for the text's first `tokens` tokens; residents go if need be. False: not even then."""
        while True:
            try:
                self.pool.grow(text.number, tokens)
                return True
            except OutOfMemory:
                if not self._evict():
                    return False

    def fits(self, writes: int) -> bool:
        """Whether the runner itself can store this many more tokens; residents go if need be."""
        while self._target.room() < writes:
            if not self._evict():
                return False
        return True

    def publish(self, text: Sequence) -> None:
        """The text's slot now holds its prompt: others may begin from it."""
        if self._most and text.slot is not None:
            self._index.add(text.number, text.ids[: text.slot.length])
            self._slots[text.number] = text.slot

    def release(self, text: Sequence, *, keep: bool) -> None:
        """The text is over, or must begin again. `keep`: it stays as a resident. Releasing twice is harmless."""
        slot, text.slot = text.slot, None
        if slot is None:
            return
        if keep and self._most and slot.length >= self.pool.size:
            self._stay(text, slot)
            return
        self._forget(text.number)
        self._target.close(slot)

    def drop_residents(self) -> None:
        """Give back all that no running text needs."""
        while self._evict():
            pass

    # --- residents ----------------------------------------------------------------------------------------------------

    def _stay(self, text: Sequence, slot: Slot) -> None:
        self._index.add(text.number, text.ids[: slot.length])
        self._slots[text.number] = slot
        self._residents.add(text.number)
        self.pool.shrink(text.number, slot.length)
        self.cached_pages += len(self.pool.table(text.number))
        if len(self._residents) > self._most:
            self._evict()

    def _evict(self) -> bool:
        """Close the resident used longest ago; False if there is none."""
        oldest = self._index.oldest({*self._residents})
        if not isinstance(oldest, int):
            return False
        slot = self._slots[oldest]
        self._forget(oldest)
        self._target.close(slot)
        return True

    def _forget(self, holder: int) -> None:
        self._index.remove(holder)
        self._slots.pop(holder, None)
        if holder in self._residents:
            self._residents.remove(holder)
            self.cached_pages -= len(self.pool.table(holder))
        self.pool.release(holder)

    # --- beginnings ---------------------------------------------------------------------------------------------------

    def _useful(self, text: Sequence) -> Match | None:
        """Who remembers the text's beginning; its last token is always read anew, for it says what comes next."""
        found = self._index.longest(text.ids[:-1]) if self._most else None
        return found if found is not None and found.length >= self.pool.size else None

    def _begin(self, found: Match | None) -> Slot:
        """A slot that holds what was found, if making room has left it in place."""
        if found is None or found.holder not in self._index:
            return self._target.open()
        self.hits += 1
        self.hit_tokens += found.length
        assert isinstance(found.holder, int)
        slot = self._slots[found.holder]
        lost = self._index.length(found.holder) - found.length
        if found.holder not in self._residents or lost >= self.pool.size:
            return self._target.fork(slot, found.length)
        # The next turn of a conversation: the resident ends here, and its slot goes on.
        self._forget(found.holder)
        self._target.trim(slot, found.length)
        return slot
