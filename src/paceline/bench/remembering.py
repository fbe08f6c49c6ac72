"""A runner that asks another one about each text only once.

Thousands of draws from one context meet the same few texts again and again. What the model says about a text does not
change, so it is read once and remembered; drafting, judging and keeping count, which are what an audit puts to the
test, are done anew for every draw.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from paceline.core.protocols import Ability, ModelCard, Outputs, Row, Runner, Slot, as_outputs
from paceline.core.tree import path_to

MOST_BASES = 24  # beginnings kept in the inner runner's memory


class RememberingSlot(Slot):
    """Holds the tokens of its text."""

    __slots__ = ("fresh", "tokens")

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []
        self.fresh: Row | None = None

    def settle(self, kept: list[int]) -> None:
        if self.fresh is not None:
            ids = self.fresh.ids().tolist()
            self.tokens += [ids[node] for node in kept]
            self.fresh = None
        self.length = len(self.tokens)


class RememberingRunner:
    """Answers from memory where it can. Reads chains and trees; hands out no hidden states.

    tokens  a part of the vocabulary: the runner is then the inner model confined to these tokens, numbered in this
            order. A small vocabulary makes every draw cheap, and what is exact for any target is exact for this one
    """

    def __init__(self, inner: Runner, tokens: list[int] | None = None) -> None:
        self.inner = inner
        self.card = inner.card if tokens is None else confined(inner.card, len(tokens))
        self._tokens = tokens
        self._columns = None if tokens is None else torch.tensor(tokens)
        self.abilities = inner.abilities & {Ability.TREE}
        self._said: dict[tuple[int, ...], Tensor] = {}
        self._bases: dict[tuple[int, ...], Slot] = {}
        self.passes = 0

    def open(self) -> RememberingSlot:
        return RememberingSlot()

    def forward(self, rows: list[Row], *, last_only: bool = False) -> Outputs:
        logits: list[Tensor] = []
        sizes: list[int] = []
        for row in rows:
            slot = _own(row.slot)
            ids = row.ids().tolist()
            nodes = range(len(ids) - 1, len(ids)) if last_only else range(len(ids))
            paths = [(*slot.tokens, *(ids[step] for step in path_to(row.parents, node))) for node in nodes]
            if not last_only and any(path not in self._said for path in paths):
                self._read(slot.tokens, ids, row.parents, paths)
            logits += [self.after(path) for path in paths]
            sizes.append(len(paths))
            slot.fresh = row
            slot.length = len(slot.tokens) + len(ids)
        return Outputs(torch.stack(logits), sizes)

    def after(self, tokens: tuple[int, ...]) -> Tensor:
        """Logits after a text [vocab]."""
        if tokens not in self._said:
            self._read(list(tokens[:-1]), [tokens[-1]], [-1], [tokens])
        return self._said[tokens]

    def _read(self, before: list[int], ids: list[int], parents: list[int], paths: list[tuple[int, ...]]) -> None:
        """Read a row once behind what stands before it, and remember what was said of every node."""
        self.passes += 1
        slot = self._behind(self._real(before))
        try:
            row = Row(slot, torch.tensor(self._real(ids), dtype=torch.int64), parents)
            said = as_outputs(self.inner.forward([row])).logits.float().cpu()
        finally:
            self.inner.close(slot)
        self._said.update(zip(paths, said if self._columns is None else said[:, self._columns]))

    def _real(self, ids: list[int]) -> list[int]:
        """The inner model's own numbers."""
        return ids if self._tokens is None else [self._tokens[token] for token in ids]

    def _behind(self, before: list[int]) -> Slot:
        """A slot that holds these tokens; beginnings that come again are read once."""
        if not before:
            return self.inner.open()
        key = tuple(before)
        if key not in self._bases:
            if len(self._bases) == MOST_BASES:
                for old in self._bases.values():
                    self.inner.close(old)
                self._bases.clear()
            base = self._bases[key] = self.inner.open()
            self.inner.forward([Row.chain(base, before)], last_only=True)
            self.inner.keep(base, list(range(len(before))))
        return self.inner.fork(self._bases[key], len(before))

    def keep(self, slot: Slot, nodes: list[int]) -> None:
        _own(slot).settle(nodes)

    def trim(self, slot: Slot, length: int) -> None:
        own = _own(slot)
        own.settle(list(range(len(own.fresh.parents))) if own.fresh is not None else [])
        del own.tokens[length:]
        own.length = len(own.tokens)

    def close(self, slot: Slot) -> None:
        _own(slot).tokens.clear()

    def fork(self, slot: Slot, length: int) -> RememberingSlot:
        twin = RememberingSlot()
        twin.tokens = _own(slot).tokens[:length]
        twin.length = len(twin.tokens)
        return twin

    def room(self) -> int:
        return 1 << 30


def confined(card: ModelCard, size: int) -> ModelCard:
    """The card of a model that knows only so many tokens; none of them ends a text."""
    return replace(card, vocab_size=size, end_tokens=frozenset())


def _own(slot: Slot) -> RememberingSlot:
    assert isinstance(slot, RememberingSlot), "this slot belongs to another runner"
    return slot
