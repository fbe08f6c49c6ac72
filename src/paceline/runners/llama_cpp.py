"""A GGUF file as llama.cpp computes it, behind `Runner`: our drafters, exact acceptance and audit on its kernels.

A sequence cache is a sequence id of llama.cpp's one KV cache. The branches of a draft tree are further sequence ids,
which share what lies before them: a token that several branches have in common belongs to all of their ids, and
attention follows the ids. Forgetting and forking move no data. There are no hidden states: drafters that need them are
refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from paceline.core.draft_tree import depths
from paceline.core.protocols import Runner
from paceline.core.types import Capability, ModelInfo, ModelOutput, Row, SequenceCache
from paceline.device.properties import on_host
from paceline.errors import CapabilityError, OptionError, OutOfMemory, PacelineError
from paceline.hub.gguf_model import GgufModel, locate_gguf
from paceline.kv.block_manager import BLOCK_SIZE, BlockManager
from paceline.runners.llama_cpp_context import NUM_SEQS, BatchToken, ContextSettings, LlamaContext

DEFAULT_SEQS, DEFAULT_SEQ_TOKENS = 4, 4096
NO_ID = -1


def open_llama_cpp(model: Any, device: str, kv_cache_tokens: int | None = None) -> LlamaCppRunner:
    """Load a .gguf file, or that of `default`. Raises MissingExtra, ModelError or OptionError."""
    if not isinstance(model, str):
        raise OptionError("runner llama_cpp opens a .gguf file by its name, not a loaded model")
    gguf = locate_gguf(model)
    blocks = BlockManager(-(-(kv_cache_tokens or _default_tokens(gguf)) // BLOCK_SIZE))
    settings = ContextSettings(blocks.num_blocks * BLOCK_SIZE, torch.get_num_threads(), on_gpu=not on_host(device))
    return LlamaCppRunner(gguf, LlamaContext(gguf.path, settings), blocks)


def _default_tokens(gguf: GgufModel) -> int:
    return DEFAULT_SEQS * min(gguf.max_seq_len or DEFAULT_SEQ_TOKENS, DEFAULT_SEQ_TOKENS)


class LlamaCppSequenceCache(SequenceCache):
    """A sequence id of llama.cpp; it is taken when the first token is read.

    branches  by node of the last row, where that is a tree: the ids of the branches it is part of
    """

    __slots__ = ("branches", "last_row_start", "seq_id")

    def __init__(self) -> None:
        super().__init__()
        self.seq_id = NO_ID
        self.last_row_start = 0
        self.branches: list[tuple[int, ...]] = []


def own(seq_cache: SequenceCache) -> LlamaCppSequenceCache:
    assert isinstance(seq_cache, LlamaCppSequenceCache), "this sequence cache belongs to another runner"
    return seq_cache


@dataclass(slots=True)
class SequenceIds:
    """Which sequence ids are free."""

    free: list[int] = field(default_factory=lambda: list(range(NUM_SEQS))[::-1])

    def take(self) -> int:
        if not self.free:
            raise OutOfMemory(f"llama.cpp holds {NUM_SEQS} sequences and branches of drafts: run fewer at a time")
        return self.free.pop()

    def give_back(self, seq_id: int) -> None:
        self.free.append(seq_id)


class LlamaCppRunner(Runner):
    """Logits are computed where llama.cpp runs the layers and arrive in the host's memory."""

    def __init__(self, gguf: GgufModel, context: LlamaContext, blocks: BlockManager) -> None:
        if not context.takes_back:
            raise CapabilityError(
                f"{gguf.name} keeps recurrent states, from which runner llama_cpp cannot take draft tokens back; "
                f"use the engine llama_cpp or another runner"
            )
        self.info = ModelInfo(
            gguf.name,
            context.vocab_size,
            gguf.eos_token_ids,
            gguf.max_seq_len,
            gguf.num_layers,
            gguf.hidden_size,
            "cpu",
            "gguf",
        )
        self.blocks = blocks
        self.capabilities = frozenset({Capability.TREE})
        self._context, self._ids = context, SequenceIds()

    # --- sequence caches ----------------------------------------------------------------------------------------------

    def new_cache(self) -> LlamaCppSequenceCache:
        return LlamaCppSequenceCache()

    def commit(self, seq_cache: SequenceCache, nodes: list[int]) -> None:
        cache = own(seq_cache)
        start, end = cache.last_row_start, cache.last_row_start + len(nodes)
        if cache.branches and nodes:
            branch = cache.branches[nodes[-1]][0]
            if branch != cache.seq_id:
                self._context.remove(cache.seq_id, start)
                self._context.copy(branch, cache.seq_id, start, end)
        self._cut(cache, end)

    def truncate(self, seq_cache: SequenceCache, length: int) -> None:
        cache = own(seq_cache)
        self._cut(cache, min(cache.length, length))
        self.blocks.shrink(cache, cache.length)

    def free(self, seq_cache: SequenceCache) -> None:
        cache = own(seq_cache)
        self.blocks.release(cache)
        self._cut(cache, 0)
        if cache.seq_id != NO_ID:
            self._ids.give_back(cache.seq_id)
            cache.seq_id = NO_ID

    def fork(self, seq_cache: SequenceCache, length: int) -> LlamaCppSequenceCache:
        cache, twin = own(seq_cache), self.new_cache()
        try:
            self.blocks.share(cache, twin, length // BLOCK_SIZE * BLOCK_SIZE)
            self.blocks.grow(twin, length)
            self._take_id(twin)
        except OutOfMemory:
            self.free(twin)
            raise
        if length:
            self._context.copy(cache.seq_id, twin.seq_id, 0, length)
        twin.length = length
        return twin

    def free_tokens(self) -> int:
        return self.blocks.free * self.blocks.block_size

    def _cut(self, cache: LlamaCppSequenceCache, length: int) -> None:
        """Forget all past this length, and every branch but the sequence itself."""
        for seq_id in {seq_id for ids in cache.branches for seq_id in ids} - {cache.seq_id}:
            self._context.remove(seq_id)
            self._ids.give_back(seq_id)
        cache.branches = []
        if cache.seq_id != NO_ID:
            self._context.remove(cache.seq_id, length)
        cache.length = length

    def _take_id(self, cache: LlamaCppSequenceCache) -> None:
        if cache.seq_id == NO_ID:
            cache.seq_id = self._ids.take()

    # --- passes -------------------------------------------------------------------------------------------------------

    def forward(self, rows: list[Row], *, last_only: bool = False) -> ModelOutput:
        self._reserve(rows)
        try:
            tokens = [token for row in rows for token in self._row_tokens(row, last_only)]
            logits = self._context.decode(tokens)
        except PacelineError:
            for row in rows:
                self.truncate(row.seq_cache, row.seq_cache.length)
            raise
        for row in rows:
            cache = own(row.seq_cache)
            cache.last_row_start = cache.length
            cache.length += len(row.parents)
        return ModelOutput(logits, [1 if last_only else len(row.parents) for row in rows])

    def _reserve(self, rows: list[Row]) -> None:
        """Blocks for every row, shared ones exchanged for own ones: what is written differs from what others read."""
        self.blocks.grow_rows(rows)
        try:
            for row in rows:
                start = row.seq_cache.length
                self.blocks.writable(row.seq_cache, start, start + len(row.parents))
        except OutOfMemory:
            for row in rows:
                self.blocks.shrink(row.seq_cache, row.seq_cache.length)
            raise

    def _row_tokens(self, row: Row, last_only: bool) -> list[BatchToken]:
        cache = own(row.seq_cache)
        self._take_id(cache)
        seq_ids = self._branch_ids(cache, row)
        last = len(row.parents) - 1
        return [
            BatchToken(token, cache.length + depth, seq_ids[node], not last_only or node == last)
            for node, (token, depth) in enumerate(zip(row.ids().tolist(), depths(row.parents)))
        ]

    def _branch_ids(self, cache: LlamaCppSequenceCache, row: Row) -> list[tuple[int, ...]]:
        """By node, the ids of the branches it is part of. The first branch is the sequence itself."""
        if row.is_chain:
            return [(cache.seq_id,)] * len(row.parents)
        cache.branches = [()] * len(row.parents)
        inner = set(row.parents)
        for leaf in (node for node in range(len(row.parents)) if node not in inner):
            branch, node = self._new_branch(cache), leaf
            while node >= 0:
                cache.branches[node] += (branch,)
                node = row.parents[node]
        return cache.branches

    def _new_branch(self, cache: LlamaCppSequenceCache) -> int:
        if not any(cache.branches):
            return cache.seq_id
        branch = self._ids.take()
        if cache.length:
            self._context.copy(cache.seq_id, branch, 0, cache.length)
        return branch
