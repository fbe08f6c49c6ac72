"""One prefix cache for everything that was computed of earlier sequences.

An entry holds what one owner (the target, a draft model, a head) has stored for the tokens of a sequence: a sequence
cache, or the KV of a head. Entries are found by the longest prefix a new sequence shares with them, in a radix tree
over whole blocks: a lookup costs one dictionary access a block, however many sequences are cached.

An entry of a sequence that is still running is pinned: others may fork from it, nothing evicts it. All others are
evicted least recently used first, per owner: as soon as the owner needs the room, or when its entries exceed
`max_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.kv.block_manager import BLOCK_SIZE

TARGET = "target"  # the owner of the target's sequence caches


def target_owner(lora: str | None) -> str:
    """The owner of the target's sequence caches under an adapter: keys and values of another are not its own."""
    return TARGET if lora is None else f"{TARGET}:{lora}"


@dataclass(slots=True, eq=False)
class PrefixEntry:
    """What one owner has stored for a sequence of tokens. `release` gives its memory back."""

    owner: str
    tokens: list[int]
    payload: Any
    release: Callable[[], None]
    pinned: bool = False


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """An entry whose first `length` tokens are those looked up."""

    entry: PrefixEntry
    length: int

    @property
    def lost(self) -> int:
        """Tokens of the entry past the shared prefix."""
        return len(self.entry.tokens) - self.length


@dataclass(slots=True)
class _Node:
    """One full block of tokens after the blocks above it."""

    children: dict[tuple[int, ...], _Node] = field(default_factory=dict)
    entries: dict[str, dict[PrefixEntry, None]] = field(default_factory=dict)  # by owner, latest last


class PrefixCache:
    """Entries of all owners in one radix tree."""

    def __init__(self, block_size: int = BLOCK_SIZE, max_tokens: dict[str, int] | None = None) -> None:
        """max_tokens: by owner, how many tokens its unpinned entries may hold; unlimited where it is not named."""
        self.block_size = block_size
        self._max_tokens = dict(max_tokens or {})
        self._root = _Node()
        self._entries: dict[str, dict[PrefixEntry, None]] = {}  # by owner, least recently used first
        self.hits = 0
        self.hit_tokens = 0

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))

    def __contains__(self, entry: PrefixEntry) -> bool:
        return entry in self._entries.get(entry.owner, {})

    def enabled(self, owner: str) -> bool:
        """Whether entries of this owner are kept at all."""
        return self._max_tokens.get(owner) != 0

    def limit(self, owner: str, max_tokens: int | None) -> None:
        """Bound what an owner may keep; None: no bound but its own memory."""
        if max_tokens is None:
            self._max_tokens.pop(owner, None)
        else:
            self._max_tokens[owner] = max_tokens

    # --- entries ------------------------------------------------------------------------------------------------------

    def add(self, entry: PrefixEntry) -> None:
        """Keep an entry, as the most recently used of its owner. One that is not enabled is released at once."""
        if not self.enabled(entry.owner):
            entry.release()
            return
        self._entries.setdefault(entry.owner, {})[entry] = None
        for node in self._path(entry.tokens, create=True):
            node.entries.setdefault(entry.owner, {})[entry] = None
        self._shrink(entry.owner)

    def remove(self, entry: PrefixEntry) -> None:
        """Forget an entry without releasing it: its payload is used on. Removing one that is not there is harmless."""
        if self._entries.get(entry.owner, {}).pop(entry, entry) is entry:
            return
        path = self._path(entry.tokens)
        for node in path:
            del node.entries[entry.owner][entry]
            if not node.entries[entry.owner]:
                del node.entries[entry.owner]
        self._prune(path, entry.tokens)

    def longest(self, owner: str, tokens: Sequence[int]) -> PrefixMatch | None:
        """The owner's entry that shares the longest prefix; None if none shares a full block."""
        node, depth, size = self._root, 0, self.block_size
        while (child := node.children.get(tuple(tokens[depth : depth + size]))) and owner in child.entries:
            node, depth = child, depth + size
        if not depth:
            return None
        rest = tokens[depth : depth + size]
        further = {
            entry: common_prefix_length(entry.tokens[depth : depth + size], rest) for entry in node.entries[owner]
        }
        best = max(reversed(further), key=further.__getitem__)
        return PrefixMatch(best, depth + further[best])

    def use(self, match: PrefixMatch) -> None:
        """Count a hit; the entry becomes the most recently used of its owner."""
        self.hits += 1
        self.hit_tokens += match.length
        entries = self._entries[match.entry.owner]
        entries.pop(match.entry)
        entries[match.entry] = None

    # --- eviction -----------------------------------------------------------------------------------------------------

    def evict(self, owner: str) -> bool:
        """Release the owner's least recently used entry that is not pinned; False if there is none."""
        oldest = next((entry for entry in self._entries.get(owner, {}) if not entry.pinned), None)
        if oldest is None:
            return False
        self.remove(oldest)
        oldest.release()
        return True

    def clear(self, owner: str | None = None) -> None:
        """Release all entries that are not pinned, of one owner or of all."""
        for name in [owner] if owner is not None else list(self._entries):
            while self.evict(name):
                pass

    def cached_tokens(self, owner: str) -> int:
        """Tokens of the owner's unpinned entries. Blocks that several of them share count for each."""
        return sum(len(entry.tokens) for entry in self._entries.get(owner, {}) if not entry.pinned)

    def _shrink(self, owner: str) -> None:
        most = self._max_tokens.get(owner)
        while most is not None and self.cached_tokens(owner) > most and self.evict(owner):
            pass

    # --- the radix tree -----------------------------------------------------------------------------------------------

    def _path(self, tokens: Sequence[int], *, create: bool = False) -> list[_Node]:
        """The nodes of the full blocks of `tokens`, below the root."""
        node, path = self._root, []
        for key in self._keys(tokens):
            node = node.children.setdefault(key, _Node()) if create else node.children[key]
            path.append(node)
        return path

    def _keys(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        size = self.block_size
        return [tuple(tokens[start : start + size]) for start in range(0, len(tokens) - size + 1, size)]

    def _prune(self, path: list[_Node], tokens: Sequence[int]) -> None:
        """Drop nodes that no entry passes through any more, deepest first."""
        for parent, node, key in reversed(list(zip([self._root, *path], path, self._keys(tokens)))):
            if not node.entries and not node.children:
                del parent.children[key]


def common_prefix_length(tokens: Sequence[int], others: Sequence[int]) -> int:
    """How many tokens two sequences share before they differ."""
    count = 0
    for a, b in zip(tokens, others):
        if a != b:
            break
        count += 1
    return count
