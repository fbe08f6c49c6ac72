"""An exact toy model: a table holds the next token's logits, looked up by the tokens just before it.

Every distribution it has can be enumerated, so the exactness of the whole engine can be tested to the last digit. It
ships with the package: tests, dry runs and `paceline audit` use it.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from paceline.core.draft_tree import ROOT
from paceline.core.protocols import Adapter, Runner
from paceline.core.sampling import SamplingParams, distribution
from paceline.core.state_view import StateView
from paceline.core.types import Capability, ModelInfo, ModelOutput, Row, SequenceCache
from paceline.errors import OptionError
from paceline.kv.block_manager import BlockManager

LAYERS = 4  # the toy reports so many: an early exit has blurred logits


class TableSequenceCache(SequenceCache):
    """Stores the tokens themselves."""

    __slots__ = ("pending", "tokens")

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []
        self.pending = Row(self, torch.empty(0, dtype=torch.int64), [])  # the last row read, until it is committed


class TableRunner(Runner):
    """Logits by the last `order` tokens. Two runners of one seed are the same model; `blur` makes one differ from it.

    blur    0: the table itself; towards 1: more and more another table. A draft of the target is its blurred twin.
    blocks  accounting of what its sequence caches hold
    """

    def __init__(
        self,
        vocab_size: int = 6,
        order: int = 2,
        seed: int = 0,
        blur: float = 0.0,
        eos_token_ids: frozenset[int] = frozenset(),
        blocks: BlockManager | None = None,
    ) -> None:
        if vocab_size < 2 or order < 1 or not 0 <= blur <= 1:
            raise OptionError("a table needs at least 2 tokens, an order of 1 or more and a blur from 0 to 1")
        self.order, self.seed, self.blur = order, seed, blur
        # One more symbol stands for "before the beginning".
        shape = ((vocab_size + 1) ** order, vocab_size)
        sharp = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 1.5
        other = torch.randn(shape, generator=torch.Generator().manual_seed(seed + 7919)) * 1.5
        self.table = (1 - blur) * sharp + blur * other  # [contexts, vocab]
        self.info = ModelInfo("table", vocab_size, eos_token_ids, 1 << 16, LAYERS, vocab_size, "cpu", "float32")
        self.capabilities = frozenset({Capability.TREE, Capability.HIDDEN_STATES, Capability.EARLY_EXIT})
        self.blocks = blocks or BlockManager()

    # --- sequence caches ----------------------------------------------------------------------------------------------

    def new_cache(self) -> TableSequenceCache:
        return TableSequenceCache()

    def commit(self, seq_cache: SequenceCache, nodes: list[int]) -> None:
        cache = _own(seq_cache)
        tokens = _tokens(cache.pending)
        cache.tokens += [tokens[node] for node in nodes]
        self._settle(cache)

    def truncate(self, seq_cache: SequenceCache, length: int) -> None:
        cache = _own(seq_cache)
        _absorb(cache)
        del cache.tokens[length:]
        self._settle(cache)
        self.blocks.shrink(cache, cache.length)

    def free(self, seq_cache: SequenceCache) -> None:
        cache = _own(seq_cache)
        cache.tokens.clear()
        self.blocks.release(cache)

    def fork(self, seq_cache: SequenceCache, length: int) -> TableSequenceCache:
        twin = TableSequenceCache()
        twin.tokens = _own(seq_cache).tokens[:length]
        self.blocks.grow(twin, len(twin.tokens))
        self._settle(twin)
        return twin

    def free_tokens(self) -> int:
        return self.blocks.free * self.blocks.block_size

    # --- passes -------------------------------------------------------------------------------------------------------

    def forward(self, rows: list[Row], *, last_only: bool = False) -> ModelOutput:
        self.blocks.grow_rows(rows)
        contexts: list[int] = []
        for row in rows:
            cache = _own(row.seq_cache)
            _absorb(cache)
            contexts += [self.context(recent) for recent in _recent(cache.tokens[-self.order :], row, self.order)]
            cache.pending = row
            cache.length = len(cache.tokens) + len(row.parents)
        sizes = [len(row.parents) for row in rows]
        # The toy's hidden state is its logits: a head on top of it can be as good as the model.
        logits = self.table[torch.tensor(contexts, dtype=torch.int64)]
        features = torch.cat([logits] * 3, dim=-1)
        if last_only:
            ends = torch.tensor(sizes).cumsum(0) - 1
            return ModelOutput(logits[ends], [1] * len(rows), logits, features, sizes)
        return ModelOutput(logits, sizes, logits, features, sizes)

    # --- for drafters that read the target's states -------------------------------------------------------------------

    def expose(self, *, hidden: bool = False, features: tuple[int, ...] = ()) -> StateView:
        """The toy always returns every state."""
        return StateView(features, lambda: features)

    def hidden_view(self) -> TableRunner:
        return self

    def early_exit(self, layer: int, adapter: Adapter | None = None) -> TableRunner:
        """The toy stopped after `layer` of its layers: a blurred twin."""
        blur = 0.5 * (1 - layer / LAYERS)
        twin = TableRunner(self.info.vocab_size, self.order, self.seed, blur=blur, blocks=self.blocks)
        if adapter is not None:
            twin.table = adapter(twin.table).detach()
        return twin

    def lm_head(self, hidden: Tensor) -> Tensor:
        return hidden

    def embed(self, tokens: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(tokens, self.info.hidden_size).float()

    # --- what tests compare with --------------------------------------------------------------------------------------

    def exact(self, prompt: list[int], length: int, sampling: SamplingParams) -> dict[tuple[int, ...], float]:
        """The exact probability of every continuation of `length` tokens. End tokens are ignored."""
        probabilities: dict[tuple[int, ...], float] = {}
        for path in itertools.product(range(self.info.vocab_size), repeat=length):
            probability = 1.0
            for depth, token in enumerate(path):
                row = self.table[self.context(prompt + list(path[:depth]))]
                probability *= float(distribution(row, sampling)[token])
            probabilities[path] = probability
        return probabilities

    def context(self, tokens: list[int]) -> int:
        """The row of the table for what comes after these tokens."""
        blank = self.info.vocab_size
        recent = ([blank] * self.order + tokens)[-self.order :]
        index = 0
        for token in recent:
            index = index * (blank + 1) + token
        return index

    _context = context  # the former name, until every caller has moved

    def _settle(self, seq_cache: TableSequenceCache) -> None:
        seq_cache.pending = Row(seq_cache, torch.empty(0, dtype=torch.int64), [])
        seq_cache.length = len(seq_cache.tokens)


def _absorb(seq_cache: TableSequenceCache) -> None:
    """A row that was never committed is kept as a whole."""
    if len(seq_cache.pending.parents):
        seq_cache.tokens += _tokens(seq_cache.pending)


def _own(seq_cache: SequenceCache) -> TableSequenceCache:
    assert isinstance(seq_cache, TableSequenceCache), "this sequence cache belongs to another runner"
    return seq_cache


def _recent(before: list[int], row: Row, order: int) -> list[list[int]]:
    """The last `order` tokens up to and including each node of a row, along its path."""
    paths: list[list[int]] = []
    for token, parent in zip(_tokens(row), row.parents):
        paths.append(((before if parent == ROOT else paths[parent]) + [token])[-order:])
    return paths


def _tokens(row: Row) -> list[int]:
    """All token ids of a row, its lead included."""
    return ([] if row.lead is None else [row.lead]) + row.tokens.tolist()
