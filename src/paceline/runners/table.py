"""An exact toy model: the next token's logits stand in a table, looked up by the tokens just before it.

Every distribution it has can be enumerated, so exactness of the whole machinery can be tested to the last digit. It
ships with the package: tests, dry runs and `paceline audit` use it.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from paceline.core.distribution import SamplingParams, distribution
from paceline.core.protocols import Ability, Adapter, ModelCard, Outputs, Row, Slot
from paceline.core.tree import ROOT
from paceline.errors import OptionError

LAYERS = 4  # the toy pretends to have this many: leaving early gives blurred logits


class TableSlot(Slot):
    """Remembers the tokens themselves."""

    __slots__ = ("fresh", "tokens")

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []
        self.fresh = Row(self, torch.empty(0, dtype=torch.int64), [])


class TableRunner:
    """Logits by the last `order` tokens. Two runners of one seed are the same model; `blur` makes one differ from it.

    blur  0: the table itself; towards 1: more and more another table. A draft of the target is its blurred twin.
    """

    def __init__(
        self,
        vocab_size: int = 6,
        order: int = 2,
        seed: int = 0,
        blur: float = 0.0,
        end_tokens: frozenset[int] = frozenset(),
    ) -> None:
        if vocab_size < 2 or order < 1 or not 0 <= blur <= 1:
            raise OptionError("a table needs at least 2 tokens, an order of 1 or more and a blur from 0 to 1")
        self.order, self.seed, self.blur = order, seed, blur
        # One more symbol stands for "before the beginning".
        shape = ((vocab_size + 1) ** order, vocab_size)
        sharp = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 1.5
        other = torch.randn(shape, generator=torch.Generator().manual_seed(seed + 7919)) * 1.5
        self._other = other
        self.table = (1 - blur) * sharp + blur * other  # [contexts, vocab]
        self.card = ModelCard("table", vocab_size, end_tokens, 1 << 16, LAYERS, vocab_size, "cpu", "float32")
        self.abilities = frozenset({Ability.TREE, Ability.HIDDEN, Ability.EXIT})

    def open(self) -> TableSlot:
        return TableSlot()

    def forward(self, rows: list[Row], *, last_only: bool = False) -> Outputs:
        contexts: list[int] = []
        for row in rows:
            slot = _own(row.slot)
            self._absorb(slot)
            contexts += [self._context(recent) for recent in _recent(slot.tokens[-self.order :], row, self.order)]
            slot.fresh = row
            slot.length = len(slot.tokens) + len(row.parents)
        read = [len(row.parents) for row in rows]
        # The toy's hidden state is its logits: a head on top of it can be as good as the model.
        said = self.table[torch.tensor(contexts, dtype=torch.int64)]
        features = torch.cat([said] * 3, dim=-1)
        if last_only:
            ends = torch.tensor(read).cumsum(0) - 1
            return Outputs(said[ends], [1] * len(rows), said, features, read)
        return Outputs(said, read, said, features, read)

    def keep(self, slot: Slot, nodes: list[int]) -> None:
        own = _own(slot)
        tokens = _tokens(own.fresh)
        own.tokens += [tokens[node] for node in nodes]
        self._settle(own)

    def trim(self, slot: Slot, length: int) -> None:
        own = _own(slot)
        self._absorb(own)
        del own.tokens[length:]
        self._settle(own)

    def close(self, slot: Slot) -> None:
        _own(slot).tokens.clear()

    def fork(self, slot: Slot, length: int) -> TableSlot:
        twin = TableSlot()
        twin.tokens = _own(slot).tokens[:length]
        self._settle(twin)
        return twin

    def room(self) -> int:
        return 1 << 30

    def expose(self, *, hidden: bool = False, features: tuple[int, ...] = ()) -> None:
        """The toy always hands everything out."""

    def exit_at(self, layer: int, adapter: Adapter | None = None) -> TableRunner:
        """The toy left after `layer` of its layers: a blurred twin."""
        twin = TableRunner(self.card.vocab_size, self.order, self.seed, blur=0.5 * (1 - layer / LAYERS))
        if adapter is not None:
            twin.table = adapter(twin.table).detach()
        return twin

    def head(self, hidden: Tensor) -> Tensor:
        """Hidden states -> logits."""
        return hidden

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens -> input vectors."""
        return torch.nn.functional.one_hot(tokens, self.card.width).float()

    def exact(self, prompt: list[int], length: int, sampling: SamplingParams) -> dict[tuple[int, ...], float]:
        """The exact probability of every continuation of `length` tokens. End tokens are not looked at."""
        found: dict[tuple[int, ...], float] = {}
        for path in itertools.product(range(self.card.vocab_size), repeat=length):
            chance = 1.0
            for depth, token in enumerate(path):
                row = self.table[self._context(prompt + list(path[:depth]))]
                chance *= float(distribution(row, sampling)[token])
            found[path] = chance
        return found

    def _context(self, tokens: list[int]) -> int:
        blank = self.card.vocab_size
        recent = ([blank] * self.order + tokens)[-self.order :]
        index = 0
        for token in recent:
            index = index * (blank + 1) + token
        return index

    def _absorb(self, slot: TableSlot) -> None:
        """A row that nobody kept stands as a whole."""
        if len(slot.fresh.parents):
            slot.tokens += _tokens(slot.fresh)

    def _settle(self, slot: TableSlot) -> None:
        slot.fresh = Row(slot, torch.empty(0, dtype=torch.int64), [])
        slot.length = len(slot.tokens)


def _own(slot: Slot) -> TableSlot:
    assert isinstance(slot, TableSlot), "this slot belongs to another runner"
    return slot


def _recent(before: list[int], row: Row, order: int) -> list[list[int]]:
    """The last `order` tokens up to and including each node of a row, along its path."""
    found: list[list[int]] = []
    for token, parent in zip(_tokens(row), row.parents):
        found.append(((before if parent == ROOT else found[parent]) + [token])[-order:])
    return found


def _tokens(row: Row) -> list[int]:
    """All token ids of a row, its lead included."""
    return ([] if row.lead is None else [row.lead]) + row.tokens.tolist()
