"""An exact toy model: the next token's logits stand in a table, looked up by the tokens just before it.

Every distribution it has can be enumerated, so exactness of the whole machinery can be tested to the last digit. It
ships with the package: tests, dry runs and `paceline audit` use it.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from paceline.core.draft_tree import ROOT
from paceline.core.protocols import Adapter, Runner
from paceline.core.sampling import SamplingParams, distribution
from paceline.core.types import Capability, ModelInfo, ModelOutput, Row, SequenceCache
from paceline.errors import OptionError
from paceline.kv.block_manager import BlockManager

LAYERS = 4  # the toy pretends to have this many: leaving early gives blurred logits


class TableSequenceCache(SequenceCache):
    """Remembers the tokens themselves."""

    __slots__ = ("fresh", "tokens")

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []
        self.fresh = Row(self, torch.empty(0, dtype=torch.int64), [])


class TableRunner(Runner):
    """Logits by the last `order` tokens. Two runners of one seed are the same model; `blur` makes one differ from it.

    blur  0: the table itself; towards 1: more and more another table. A draft of the target is its blurred twin.
    """

    def __init__(
        self,
        vocab_size: int = 6,
        order: int = 2,
        seed: int = 0,
        blur: float = 0.0,
        eos_token_ids: frozenset[int] = frozenset(),
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
        self.info = ModelInfo("table", vocab_size, eos_token_ids, 1 << 16, LAYERS, vocab_size, "cpu", "float32")
        self.blocks = BlockManager()
        self.capabilities = frozenset({Capability.TREE, Capability.HIDDEN_STATES, Capability.EARLY_EXIT})

    def new_cache(self) -> TableSequenceCache:
        return TableSequenceCache()

    def forward(self, rows: list[Row], *, last_only: bool = False) -> ModelOutput:
        contexts: list[int] = []
        for row in rows:
            seq_cache = _own(row.seq_cache)
            self._absorb(seq_cache)
            contexts += [self._context(recent) for recent in _recent(seq_cache.tokens[-self.order :], row, self.order)]
            seq_cache.fresh = row
            seq_cache.length = len(seq_cache.tokens) + len(row.parents)
        read = [len(row.parents) for row in rows]
        # The toy's hidden state is its logits: a head on top of it can be as good as the model.
        output = self.table[torch.tensor(contexts, dtype=torch.int64)]
        features = torch.cat([output] * 3, dim=-1)
        if last_only:
            ends = torch.tensor(read).cumsum(0) - 1
            return ModelOutput(output[ends], [1] * len(rows), output, features, read)
        return ModelOutput(output, read, output, features, read)

    def commit(self, seq_cache: SequenceCache, nodes: list[int]) -> None:
        own = _own(seq_cache)
        tokens = _tokens(own.fresh)
        own.tokens += [tokens[node] for node in nodes]
        self._settle(own)

    def truncate(self, seq_cache: SequenceCache, length: int) -> None:
        own = _own(seq_cache)
        self._absorb(own)
        del own.tokens[length:]
        self._settle(own)

    def free(self, seq_cache: SequenceCache) -> None:
        _own(seq_cache).tokens.clear()

    def fork(self, seq_cache: SequenceCache, length: int) -> TableSequenceCache:
        twin = TableSequenceCache()
        twin.tokens = _own(seq_cache).tokens[:length]
        self._settle(twin)
        return twin

    def free_tokens(self) -> int:
        return 1 << 30

    def expose(self, *, hidden: bool = False, features: tuple[int, ...] = ()) -> None:
        """The toy always hands everything out."""

    def early_exit(self, layer: int, adapter: Adapter | None = None) -> TableRunner:
        """The toy left after `layer` of its layers: a blurred twin."""
        twin = TableRunner(self.info.vocab_size, self.order, self.seed, blur=0.5 * (1 - layer / LAYERS))
        if adapter is not None:
            twin.table = adapter(twin.table).detach()
        return twin

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Hidden states -> logits."""
        return hidden

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens -> input vectors."""
        return torch.nn.functional.one_hot(tokens, self.info.hidden_size).float()

    def exact(self, prompt: list[int], length: int, sampling: SamplingParams) -> dict[tuple[int, ...], float]:
        """The exact probability of every continuation of `length` tokens. End tokens are not looked at."""
        found: dict[tuple[int, ...], float] = {}
        for path in itertools.product(range(self.info.vocab_size), repeat=length):
            uniforms = 1.0
            for depth, token in enumerate(path):
                row = self.table[self._context(prompt + list(path[:depth]))]
                uniforms *= float(distribution(row, sampling)[token])
            found[path] = uniforms
        return found

    def _context(self, tokens: list[int]) -> int:
        blank = self.info.vocab_size
        recent = ([blank] * self.order + tokens)[-self.order :]
        index = 0
        for token in recent:
            index = index * (blank + 1) + token
        return index

    def _absorb(self, seq_cache: TableSequenceCache) -> None:
        """A row that nobody kept stands as a whole."""
        if len(seq_cache.fresh.parents):
            seq_cache.tokens += _tokens(seq_cache.fresh)

    def _settle(self, seq_cache: TableSequenceCache) -> None:
        seq_cache.fresh = Row(seq_cache, torch.empty(0, dtype=torch.int64), [])
        seq_cache.length = len(seq_cache.tokens)


def _own(seq_cache: SequenceCache) -> TableSequenceCache:
    assert isinstance(seq_cache, TableSequenceCache), "this slot belongs to another runner"
    return seq_cache


def _recent(before: list[int], row: Row, order: int) -> list[list[int]]:
    """The last `order` tokens up to and including each node of a row, along its path."""
    found: list[list[int]] = []
    for token, parent in zip(_tokens(row), row.parents):
        found.append(((before if parent == ROOT else found[parent]) + [token])[-order:])
    return found


def _tokens(row: Row) -> list[int]:
    """All token ids of a row, its lead included."""
    return ([] if row.lead is None else [row.lead]) + row.tokens.tolist()
