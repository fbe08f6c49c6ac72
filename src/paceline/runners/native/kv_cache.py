"""Keys and values of all sequences in blocks, and what the runner knows of one sequence."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from paceline.core.protocols import Runner
from paceline.core.types import Row, SequenceCache
from paceline.device.memory import zeroed_cache
from paceline.errors import OutOfMemory
from paceline.kv.block_manager import BLOCK_SIZE, BlockCopy, BlockManager
from paceline.kv.window_blocks import WindowBlocks, window_limit, window_pool_tokens
from paceline.layers.attention import CacheTensors, LayerCaches
from paceline.layers.kv_rounding import STORED_DTYPE
from paceline.models.config import ArchConfig
from paceline.runners.native.early_exit import EarlyExitState
from paceline.runners.native.recurrent_states import NoStates, RecurrentStates, num_slots
from paceline.runners.native.sequence_state import ReadTokens, SequenceState


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


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What the tensors of one group are made of."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class BlockTables:
    """Of one sequence: of layers that see everything, and of those with a window."""

    full: list[int]
    windowed: list[int]


class LayerGroup:
    """Keys and values [layers, tokens, key heads, head_dim] of layers that keep the same tokens, behind one pool."""

    def __init__(self, shape: CacheShape, blocks: BlockManager) -> None:
        self.blocks, self.block_size = blocks, blocks.block_size
        self.num_tokens = blocks.num_blocks * blocks.block_size
        self.padding_slot = self.num_tokens  # in a block behind the last one, which belongs to no sequence
        size = (shape.num_layers, self.num_tokens + blocks.block_size, shape.num_kv_heads, shape.head_dim)
        self.keys, self.values = (zeroed_cache(size, shape.dtype, shape.device) for _ in range(2))

    @property
    def tensors(self) -> CacheTensors:
        return CacheTensors(self.keys, self.values)

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
        return torch.tensor(scattered, device=self.keys.device)

    def move(self, seq_cache: SequenceCache, sources: list[int], targets: list[int]) -> None:
        """Copy tokens of a sequence from some positions to others."""
        source = torch.tensor([self.slot(seq_cache, token) for token in sources], device=self.keys.device)
        target = torch.tensor([self.slot(seq_cache, token) for token in targets], device=self.keys.device)
        for cache in (self.keys, self.values):
            cache[:, target] = cache[:, source]

    def copy_blocks(self, copies: list[BlockCopy]) -> None:
        """Before their holders write into them."""
        size = self.block_size
        for cache, copy in product((self.keys, self.values), copies):
            source, target = (slice(block * size, (block + 1) * size) for block in (copy.source, copy.target))
            cache[:, target] = cache[:, source]


class WindowedGroup(LayerGroup):
    """Of layers with a sliding window, which keep little more than that of a sequence."""

    def __init__(self, shape: CacheShape, blocks: WindowBlocks) -> None:
        super().__init__(shape, blocks)
        self._window_blocks = blocks

    def reserve(self, ends: Mapping[SequenceCache, int]) -> None:
        """Blocks for all sequences of a pass, up to their ends. Raises OutOfMemory."""
        starts: dict[Hashable, int] = {seq_cache: seq_cache.length for seq_cache in ends}
        for seq_cache, end in ends.items():
            self.copy_blocks(self._window_blocks.reserve(seq_cache, end, starts))

    def touch(self, seq_cache: SequenceCache) -> None:
        """The sequence is used now."""
        self._window_blocks.touched(seq_cache)

    def lacks(self, seq_cache: SequenceCache) -> bool:
        """Whether a part of its window is gone."""
        return self._window_blocks.lacks(seq_cache, seq_cache.length)


class KVCache:
    """Keys and values of all layers behind a BlockManager. Raises OutOfMemory.

    dtype    of the numbers that attention reads
    rounded  keys and values are kept in eight bits (layers/kv_rounding.py)

    Layers with a sliding window are a group of their own with fewer blocks (kv/window_blocks.py); the engine knows of
    the other pool alone.
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
        self.blocks, self.block_size, self.dtype, self.device = blocks, blocks.block_size, dtype, device
        self.num_tokens = blocks.num_blocks * blocks.block_size
        self.places = layer_places(config)
        num_windowed = sum(attention.window is not None for attention in config.layer_attention)
        stored = STORED_DTYPE if rounded else dtype
        shape = CacheShape(config.num_kv_layers - num_windowed, config.num_kv_heads, config.head_dim, stored, device)
        try:
            self.full = LayerGroup(shape, blocks)
            pool = window_blocks(config, blocks)
            self.windowed = None if pool is None else WindowedGroup(replace(shape, num_layers=num_windowed), pool)
            self.states = self._states(config)
        except (torch.OutOfMemoryError, OSError, RuntimeError) as error:
            raise _does_not_fit(self.num_tokens) from error

    def _states(self, config: ArchConfig) -> NoStates:
        if config.delta_net is None:
            return NoStates()
        slots = num_slots(config.delta_net, self.dtype, 2 * self.full.keys.nbytes)
        return RecurrentStates(config.delta_net, slots, self.dtype, self.device)

    @property
    def groups(self) -> list[LayerGroup]:
        return [self.full] if self.windowed is None else [self.full, self.windowed]

    def group(self, window: int | None) -> LayerGroup:
        """Of the layers with this window."""
        return self.full if window is None or self.windowed is None else self.windowed

    def tables(self, seq_cache: SequenceCache) -> BlockTables:
        """The block tables of a sequence. Not copies."""
        return BlockTables(self.full.table(seq_cache), [] if self.windowed is None else self.windowed.table(seq_cache))

    @property
    def caches(self) -> LayerCaches:
        """The tensors, as attention reads them."""
        return LayerCaches(self.full.tensors, None if self.windowed is None else self.windowed.tensors, self.places)

    @property
    def keys(self) -> Tensor:
        """Of layers without a window."""
        return self.full.keys

    @property
    def values(self) -> Tensor:
        return self.full.values

    # --- blocks -------------------------------------------------------------------------------------------------------

    def reserve(self, seq_cache: SequenceCache, start: int, end: int) -> None:
        """Blocks for tokens up to `end`, of which those from `start` on may be written. Raises OutOfMemory."""
        self.blocks.grow(seq_cache, end)
        self.full.copy_blocks(self.blocks.writable(seq_cache, start, end))

    def make_writable(self, seq_cache: SequenceCache, start: int, end: int) -> None:
        """Copies of the shared blocks among tokens start to end, one after another. Raises OutOfMemory."""
        for place in range(start - start % self.block_size, end, self.block_size):
            self.reserve(seq_cache, place, min(place + self.block_size, end))

    def reserve_rows(self, rows: list[Row], num_steps: int = 1) -> None:
        """Blocks for every row and the tokens written after it, or OutOfMemory and nothing changed."""
        ends = {row.seq_cache: row.seq_cache.length + len(row.parents) + num_steps - 1 for row in rows}
        try:
            for seq_cache, end in ends.items():
                self.reserve(seq_cache, seq_cache.length, end)
            self.reserve_windows(ends)
        except OutOfMemory:
            for seq_cache in ends:
                self.shrink(seq_cache)
            raise

    def reserve_windows(self, ends: Mapping[SequenceCache, int]) -> None:
        """The same in the pool of layers with a window, for all sequences of a pass. Raises OutOfMemory."""
        if self.windowed is not None:
            self.windowed.reserve(ends)

    def lacks(self, seq_cache: NativeSequenceCache) -> bool:
        """Whether layers must read the tokens of a sequence again: a state or a part of a window is gone."""
        windows = self.windowed is not None and self.windowed.lacks(seq_cache)
        return windows or self.states.lacks(seq_cache.recurrent, seq_cache.length)

    def touch(self, rows: list[Row]) -> None:
        """Room for others comes from sequences that are not among these, as long as it can."""
        if self.windowed is not None:
            for row in rows:
                self.windowed.touch(row.seq_cache)

    def first_lacking(self, seq_cache: NativeSequenceCache) -> int:
        """The first token that must be read again. What a window lacks depends on all tokens before it."""
        if self.windowed is not None and self.windowed.lacks(seq_cache):
            return 0
        return seq_cache.recurrent.now.end

    def shrink(self, seq_cache: SequenceCache) -> None:
        """Give back blocks past the length of a sequence."""
        for group in self.groups:
            group.blocks.shrink(seq_cache, seq_cache.length)


def window_blocks(config: ArchConfig, blocks: BlockManager) -> WindowBlocks | None:
    """The pool of layers with a window beside that of all others; None: there are no such layers."""
    windows = [window for window in config.windows if window is not None]
    if not windows:
        return None
    cache_tokens = blocks.num_blocks * blocks.block_size
    tokens = window_pool_tokens(cache_tokens, max(windows), blocks.block_size)
    blocks.window_limit = window_limit(cache_tokens, max(windows), blocks.block_size) if tokens < cache_tokens else None
    return WindowBlocks(blocks.needed(tokens), max(windows), blocks.block_size)


def layer_places(config: ArchConfig) -> tuple[int, ...]:
    """Of each layer its number among those of its group; empty: as they are numbered."""
    windowed = [attention.window is not None for attention in config.layer_attention]
    return tuple(windowed[:layer].count(kind) for layer, kind in enumerate(windowed))


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
            sources, targets = [start + node for node, _ in moved], [start + place for _, place in moved]
            for group in self.kv.groups:
                group.move(cache, sources, targets)
            cache.recurrent.history.keep(start, nodes)
        cache.length = cache.last_row_start + len(nodes)
        self.kv.states.settle(cache.recurrent, cache.length)

    def truncate(self, seq_cache: SequenceCache, length: int) -> None:
        cache = own(seq_cache)
        cache.length, cache.exit_state = min(cache.length, length), None
        self.kv.shrink(cache)
        self.kv.states.settle(cache.recurrent, cache.length)

    def free(self, seq_cache: SequenceCache) -> None:
        cache = own(seq_cache)
        for group in self.kv.groups:
            group.blocks.release(cache)
        self.kv.states.free(cache.recurrent)
        cache.length, cache.exit_state, cache.recurrent.history = 0, None, ReadTokens()

    def fork(self, seq_cache: SequenceCache, length: int) -> NativeSequenceCache:
        twin = NativeSequenceCache()
        self.kv.states.fork(own(seq_cache).recurrent, twin.recurrent, length)
        for group in self.kv.groups:
            group.blocks.share(own(seq_cache), twin, length)
        twin.recurrent.history = own(seq_cache).recurrent.history.copy()
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
