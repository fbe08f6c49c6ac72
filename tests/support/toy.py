"""The toy of all engine tests: a table model whose passes are counted, and a tokenizer with a letter for each token."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from paceline.core.types import ModelOutput, Row, SequenceCache
from paceline.hub.tokenizer import Tokenizer
from paceline.kv.block_manager import UNBOUNDED, BlockManager
from paceline.runners.table import TableRunner, TableSequenceCache

VOCAB_SIZE = 6
LETTERS = "abcdefghijklmnopqrstuvwxyz"


class ToyRunner(TableRunner):
    """Counts sequence caches and passes, has a limited number of blocks, and raises on demand.

    decode_steps    plain steps it takes in a row
    shares_blocks   a fork shares the blocks of its prefix, as the native runner's does
    """

    def __init__(
        self,
        num_blocks: int = UNBOUNDED,
        block_size: int = 4,
        *,
        decode_steps: int = 1,
        shares_blocks: bool = True,
        **table: Any,
    ) -> None:
        super().__init__(**{"vocab_size": VOCAB_SIZE, "order": 2, "seed": 3, **table})
        self.blocks = BlockManager(num_blocks, block_size)
        self.decode_steps = decode_steps
        self.open_caches: set[int] = set()
        self.passes: list[list[int]] = []  # widths of the rows of each pass
        self.decodes: list[int] = []  # plain steps taken in each call of `decode`
        self.errors: list[Exception] = []  # raised by the next passes
        self._shares_blocks = shares_blocks

    def new_cache(self) -> TableSequenceCache:
        seq_cache = super().new_cache()
        self.open_caches.add(id(seq_cache))
        return seq_cache

    def fork(self, seq_cache: SequenceCache, length: int) -> TableSequenceCache:
        if not self._shares_blocks:
            fork = super().fork(seq_cache, length)
            self.open_caches.add(id(fork))
            return fork
        assert isinstance(seq_cache, TableSequenceCache)
        fork = self.new_cache()
        fork.tokens, fork.length = seq_cache.tokens[:length], length
        self.blocks.share(seq_cache, fork, length)
        return fork

    def free(self, seq_cache: SequenceCache) -> None:
        super().free(seq_cache)
        self.open_caches.discard(id(seq_cache))

    def forward(self, rows: list[Row], *, last_only: bool = False) -> ModelOutput:
        if self.errors:
            raise self.errors.pop(0)
        self.passes.append([len(row.parents) for row in rows])
        return super().forward(rows, last_only=last_only)

    def decode(self, rows: list[Row], num_steps: int) -> Tensor:
        """The reference: one pass a step, and the argmax of each."""
        self.decodes.append(num_steps)
        tokens: list[Tensor] = []
        for _ in range(num_steps):
            tokens.append(super().forward(rows).logits.argmax(dim=-1))
            rows = [Row.chain(row.seq_cache, tokens[-1][index : index + 1]) for index, row in enumerate(rows)]
        return torch.stack(tokens, dim=1)


class _LetterTokenizer:
    """As much of a tokenizer of transformers as the package uses: one letter a token."""

    chat_template = None
    eos_token_id = pad_token_id = 0

    def __call__(self, text: str) -> SimpleNamespace:
        return SimpleNamespace(input_ids=[LETTERS.index(letter) for letter in text])

    def decode(self, ids: list[int], **options: Any) -> str:
        return "".join(LETTERS[token] for token in ids)

    def get_vocab(self) -> dict[str, int]:
        return {letter: token for token, letter in enumerate(LETTERS[:VOCAB_SIZE])}


def letter_tokenizer() -> Tokenizer:
    return Tokenizer(_LetterTokenizer())


def random_prompts(count: int, length: int = 20, seed: int = 0) -> list[list[int]]:
    """Prompts of `length` to `length + 5` tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length + rng.randrange(6))] for _ in range(count)]
