"""A runner that asks another one about each text only once.

Thousands of draws from one context meet the same few texts again and again. What the model says about a text does not
change, so it is read once and remembered; drafting, judging and keeping count, which are what an audit puts to the
test, are done anew for every draw.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.protocols import Ability, Outputs, Row, Runner, Slot, as_outputs
from paceline.core.tree import path_to


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
    """Answers from memory where it can. Reads chains and trees; hands out no hidden states."""

    def __init__(self, inner: Runner) -> None:
        self.inner = inner
        self.card = inner.card
        self.abilities = inner.abilities & {Ability.TREE}
        self._said: dict[tuple[int, ...], Tensor] = {}
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
            paths = [[ids[step] for step in path_to(row.parents, node)] for node in nodes]
            logits += [self.after(slot.tokens + path) for path in paths]
            sizes.append(len(paths))
            slot.fresh = row
            slot.length = len(slot.tokens) + len(ids)
        return Outputs(torch.stack(logits), sizes)

    def after(self, tokens: list[int]) -> Tensor:
        """Logits after a text [vocab]."""
        key = tuple(tokens)
        if key not in self._said:
            self.passes += 1
            slot = self.inner.open()
            try:
                said = as_outputs(self.inner.forward([Row.chain(slot, tokens)], last_only=True))
                self._said[key] = said.logits[-1].float().cpu()
            finally:
                self.inner.close(slot)
        return self._said[key]

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


def _own(slot: Slot) -> RememberingSlot:
    assert isinstance(slot, RememberingSlot), "this slot belongs to another runner"
    return slot
