"""Keys and values of all sequences in blocks, and what the runner knows of one sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.protocols import Runner
from paceline.core.types import Row, SequenceCache
from paceline.device.memory import zeroed_cache
from paceline.errors import OutOfMemory
from paceline.kv.block_manager import BLOCK_SIZE, BlockManager
from paceline.layers.kv_rounding import STORED_DTYPE
from paceline.models.config import ArchConfig
from paceline.runners.native.early_exit import EarlyExitState
from paceline.runners.native.recurrent_states import NoStates, RecurrentStates, num_slots
from paceline.runners.native.sequence_state import SequenceState


class NativeSequenceCache(SequenceCache):
    """The KV cache of one sequence: a holder of blocks."""

    __slots__ = ("exit_state", "last_row_start", "recurrent")

    def __init__(self) -> None:
        super().__init__()
        self.last_row_start = 0  # where the last row read begins
        self.exit_state: EarlyExitState | None = None  # what an exit has computed for verification
        self.recurrent = SequenceState()  # of recurrent layers, where the model has any


def own(seq_cache: SequenceCache) -> NativeSequenceCache:
    assert isinstance(seq_cache, NativeSequenceCache), "this sequence cache belongs to another runner"
    return seq_cache


def block_manager(kv_cache_tokens: int) -> BlockManager:
    """Blocks for this many tokens."""
    return BlockManager(max(1, -(-kv_cache_tokens // BLOCK_SIZE)))


def _does_not_fit(tokens: int) -> OutOfMemory:
    return OutOfMemory(f"a cache of {tokens} tokens does not fit: lower --kv-cache-tokens")


class KVCache:
    """The tensors [layers, tokens, key heads, head_dim] behind a BlockManager. Raises OutOfMemory.

    dtype    of the numbers that attention reads
    rounded  keys and values are kept in eight bits (layers/kv_rounding.py)
    """

    def __init__(
        self,
        config: ArchConfig,
        blocks: BlockManager,
        dtype: torch.dtype,
        device: torch.device,
        *,
        rounded: bool = False,
    ) -> None:
        self.blocks, self.block_size, self.dtype = blocks, blocks.block_size, dtype
        self.num_tokens = blocks.num_blocks * blocks.block_size
        self.padding_slot = self.num_tokens  # in a block behind the last one, which belongs to no sequence
        shape = (config.num_kv_layers, self.num_tokens + blocks.block_size, config.num_kv_heads, config.head_dim)
        try:
            stored = STORED_DTYPE if rounded else dtype
            self.keys, self.values = (zeroed_cache(shape, stored, device) for _ in range(2))
            self.states = self._states(config)
        except (torch.OutOfMemoryError, OSError, RuntimeError) as error:
            raise _does_not_fit(self.num_tokens) from error

    def _states(self, config: ArchConfig) -> NoStates:
        if config.delta_net is None:
            return NoStates()
        slots = num_slots(config.delta_net, self.dtype, 2 * self.keys.nbytes)
        return RecurrentStates(config.delta_net, slots, self.dtype, self.device)

    @property
    def device(self) -> torch.device:
        return self.keys.device

    def table(self, seq_cache: SequenceCache) -> list[int]:
        """The block table of a sequence. Not a copy."""
        return self.blocks.table(seq_cache)

    def slot(self, seq_cache: SequenceCache, token: int) -> int:
        """Where a token of a sequence is in the flat cache."""
        return self.table(seq_cache)[token // self.block_size] * self.block_size + token % self.block_size

    def slots(self, seq_cache: SequenceCache, start: int, end: int) -> Tensor | slice:
        """Tokens start to end of a sequence in the flat cache: a slice where its blocks are neighbours."""
        size = self.block_size
        first, last = start // size, -(-end // size)
        table = self.table(seq_cache)[first:last]
        if table == list(range(table[0], table[0] + len(table))):
            offset = table[0] * size - first * size
            return slice(offset + start, offset + end)
        scattered = [table[token // size - first] * size + token % size for token in range(start, end)]
        return torch.tensor(scattered, device=self.device)

    def reserve(self, seq_cache: SequenceCache, start: int, end: int) -> None:
        """Blocks for tokens up to `end`, of which those from `start` on may be written. Raises OutOfMemory."""
        self.blocks.grow(seq_cache, end)
        for clone in self.blocks.writable(seq_cache, start, end):
            self._copy_block(clone.source, clone.target)

    def make_writable(self, seq_cache: SequenceCache, start: int, end: int) -> None:
        """Copies of the shared blocks among tokens start to end, one after another. Raises OutOfMemory."""
        for place in range(start - start % self.block_size, end, self.block_size):
            self.reserve(seq_cache, place, min(place + self.block_size, end))

    def reserve_rows(self, rows: list[Row], num_steps: int = 1) -> None:
        """Blocks for every row and the tokens written after it, or OutOfMemory and nothing changed."""
        tried: list[NativeSequenceCache] = []
        try:
            for row in rows:
                seq_cache = own(row.seq_cache)
                tried.append(seq_cache)
                self.reserve(seq_cache, seq_cache.length, seq_cache.length + len(row.parents) + num_steps - 1)
        except OutOfMemory:
            for seq_cache in tried:
                self.blocks.shrink(seq_cache, seq_cache.length)
            raise

    def move(self, seq_cache: SequenceCache, sources: list[int], targets: list[int]) -> None:
        """Copy tokens of a sequence from some positions to others."""
        source = torch.tensor([self.slot(seq_cache, token) for token in sources], device=self.device)
        target = torch.tensor([self.slot(seq_cache, token) for token in targets], device=self.device)
        for cache in (self.keys, self.values):
            cache[:, target] = cache[:, source]

    def _copy_block(self, source: int, target: int) -> None:
        size = self.block_size
        for cache in (self.keys, self.values):
            cache[:, target * size : (target + 1) * size] = cache[:, source * size : (source + 1) * size]


class PagedRunner(Runner):
    """The half of a runner that keeps sequence caches in blocks of a KVCache."""

    kv: KVCache

    def new_cache(self) -> NativeSequenceCache:
        return NativeSequenceCache()

    @torch.inference_mode()
    def commit(self, seq_cache: SequenceCache, nodes: list[int]) -> None:
        cache = own(seq_cache)
        moved = [(node, place) for place, node in enumerate(nodes) if node != place]
        if moved:
            start = cache.last_row_start
            self.kv.move(cache, [start + node for node, _ in moved], [start + place for _, place in moved])
        cache.length = cache.last_row_start + len(nodes)
        self.kv.states.settle(cache.recurrent, cache.length)

    def truncate(self, seq_cache: SequenceCache, length: int) -> None:
        cache = own(seq_cache)
        cache.length, cache.exit_state = min(cache.length, length), None
        self.kv.blocks.shrink(cache, cache.length)
        self.kv.states.settle(cache.recurrent, cache.length)

    def free(self, seq_cache: SequenceCache) -> None:
        cache = own(seq_cache)
        self.kv.blocks.release(cache)
        self.kv.states.free(cache.recurrent)
        cache.length, cache.exit_state = 0, None

    def fork(self, seq_cache: SequenceCache, length: int) -> NativeSequenceCache:
        twin = NativeSequenceCache()
        self.kv.states.fork(own(seq_cache).recurrent, twin.recurrent, length)
        self.kv.blocks.share(own(seq_cache), twin, length)
        twin.length, twin.lora = length, seq_cache.lora
        return twin

    def free_tokens(self) -> int:
        return self.kv.blocks.free * self.kv.block_size

    def rollback_draft(self, seq_cache: SequenceCache, length: int) -> None:
        """Back to `length`; what an exit has computed past it stays for the pass that verifies the draft tokens."""
        cache = own(seq_cache)
        if cache.exit_state is None:
            self.truncate(seq_cache, length)
        cache.length = length
