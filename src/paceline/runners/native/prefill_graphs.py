"""Graphs of prefills.

A prompt of a few hundred tokens is little work for a GPU, but hundreds of launches for its host, and all other
sequences wait meanwhile. Here a prompt is read in chunks of a few fixed sizes, each one graph: padded to its size,
since no token sees the padding after it, which is stored in a block that belongs to no sequence. A chunk that follows
others, or a prefix from the prefix cache, reads the keys of that context padded to a few fixed lengths, with a mask. So
a new prompt length captures nothing new.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from paceline.core.protocols import Preparation
from paceline.core.types import ModelOutput, Row, SequenceCache
from paceline.device.attention_plans import with_plans
from paceline.device.graphs import Graph, GraphCache, GraphPool, needed, rounded_up
from paceline.layers.attention import AttentionSpans, EagerBatch, SequenceSpan
from paceline.layers.ops import EagerOps
from paceline.layers.rope import CosSin, cos_sin
from paceline.models.decoder import DecoderModel
from paceline.runners.native.kv_cache import KVCache, LayerGroup
from paceline.runners.native.outputs import OutputOptions, logits_of

SIZES = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # tokens of a first chunk
LATER_SIZES = (64, 256, 1024)  # tokens of a chunk that follows a context: fewer, since there is one for each context
CONTEXTS = (512, 2048, 8192)  # tokens before a chunk; behind a longer context prompts are read eagerly
MIN_TOKENS = 3  # fewer are a decode pass
MAX_GRAPHS = 64


@dataclass(frozen=True, slots=True)
class PrefillKey:
    """What a chunk is captured for."""

    tokens: int
    context: int  # tokens before it; 0: the first chunk of a sequence
    want_hidden: bool
    feature_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PrefillSlots:
    """Where a chunk and its context are in the cache of one group of layers."""

    new: Tensor  # int64 [size]
    context: Tensor  # int64 [context]


@dataclass(frozen=True, slots=True, eq=False)
class PrefillInputs:
    """The fixed tensors a graph reads."""

    tokens: Tensor  # int64 [size]
    last: Tensor  # int64 [1]
    length: Tensor  # int64 [1]: tokens of the context that are there
    slots: list[PrefillSlots]  # by group

    @property
    def context(self) -> int:
        """Tokens of the context, padded."""
        return self.slots[0].context.shape[0]

    def of(self, window: int | None) -> PrefillSlots:
        """Of the group of layers with this window."""
        return self.slots[0] if window is None else self.slots[-1]


@dataclass(frozen=True, slots=True, eq=False)
class PrefillOutput:
    """Tensors of the graph, to be copied before the next prefill."""

    logits: Tensor  # [1, vocab] after the last token
    hidden: Tensor | None  # [size, …] padding included
    features: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Consecutive tokens of a row: from its node `first` on, behind `context` tokens in the cache."""

    seq_cache: SequenceCache
    tokens: Tensor
    context: int


def chunks_of(row: Row) -> list[Chunk]:
    """A row in chunks that there are graphs for: whole ones of the largest size, and the rest."""
    tokens, start = row.ids(), row.seq_cache.length
    parts = tokens.split(SIZES[-1])
    return [Chunk(row.seq_cache, part, start + index * SIZES[-1]) for index, part in enumerate(parts)]


class PrefillGraphs:
    """Prefills of single sequences, captured by size and context on first use or by `preparations`."""

    def __init__(
        self,
        model: DecoderModel,
        kv: KVCache,
        ops: EagerOps,
        rope_caches: tuple[Tensor, ...],
        options: OutputOptions,
        pool: GraphPool,
    ) -> None:
        self._model, self._kv, self._ops, self._options = model, kv, ops, options
        self._rope_caches, self._windows = rope_caches, model.config.windows
        self._graphs: GraphCache[PrefillKey, PrefillInputs, PrefillOutput] = GraphCache(pool, MAX_GRAPHS)

    def fits(self, rows: list[Row], last_only: bool) -> bool:
        """Whether all rows are prompts behind a context that there are graphs for."""
        return last_only and all(row.is_chain and len(row.parents) >= MIN_TOKENS and _fits(row) for row in rows)

    def forward(self, rows: list[Row]) -> ModelOutput:
        """Prefill row by row."""
        outputs = [self._read(row) for row in rows]
        return outputs[0] if len(outputs) == 1 else ModelOutput.of([row for output in outputs for row in output])

    def preparations(self, max_context: int) -> list[Preparation]:
        """Captures of every size, and behind every context up to this many tokens."""
        first = [self._key(size, 0) for size in needed(SIZES, max_context)]
        contexts, sizes = needed(CONTEXTS, max_context), needed(LATER_SIZES, max_context)
        later = [self._key(size, context) for context in contexts for size in sizes]
        return [partial(self._capture, key) for key in first + later]

    def _capture(self, key: PrefillKey) -> None:
        self._graph(key)

    def _read(self, row: Row) -> ModelOutput:
        outputs = [self._read_chunk(chunk) for chunk in chunks_of(row)]
        if len(outputs) == 1:
            return outputs[0]
        hidden = _joined([output.hidden for output in outputs])
        features = _joined([output.features for output in outputs])
        return ModelOutput(outputs[-1].logits, [1], hidden, features, [len(row.parents)])

    def _read_chunk(self, chunk: Chunk) -> ModelOutput:
        count = chunk.tokens.shape[0]
        graph = self._graph(self._key(count, chunk.context))
        self._put(graph.buffers, chunk)
        output = graph.run()
        hidden, features = (None if part is None else part[:count].clone() for part in (output.hidden, output.features))
        return ModelOutput(output.logits.clone(), [1], hidden, features, [count])

    def _put(self, inputs: PrefillInputs, chunk: Chunk) -> None:
        count, context = chunk.tokens.shape[0], chunk.context
        inputs.tokens[:count].copy_(chunk.tokens, non_blocking=True)
        inputs.last.fill_(count - 1)
        if context:
            inputs.length.fill_(context)
        for group, slots in zip(self._kv.groups, inputs.slots):
            slots.new[:count].copy_(_slots(group, chunk.seq_cache, context, context + count), non_blocking=True)
            slots.new[count:] = group.padding_slot
            if context:
                slots.context[:context].copy_(_slots(group, chunk.seq_cache, 0, context), non_blocking=True)
                slots.context[context:] = group.padding_slot

    def _key(self, count: int, context: int) -> PrefillKey:
        size = rounded_up(count, LATER_SIZES if context else SIZES)
        padded = rounded_up(context, CONTEXTS) if context else 0
        assert size is not None and padded is not None
        return PrefillKey(size, padded, self._options.want_hidden, self._options.feature_layers)

    def _graph(self, key: PrefillKey) -> Graph[PrefillKey, PrefillInputs, PrefillOutput]:
        return self._graphs.get(key, lambda: self._inputs(key), self._work)

    def _inputs(self, key: PrefillKey) -> PrefillInputs:
        """Capture runs the pass, so every slot is padding at first: it must not write into a sequence."""
        tokens, last, length = (
            torch.zeros(count, dtype=torch.int64, device=self._kv.device) for count in (key.tokens, 1, 1)
        )
        padded = [torch.full_like(tokens, group.padding_slot) for group in self._kv.groups]
        slots = [PrefillSlots(new, new[:1].repeat(key.context)) for new in padded]
        return PrefillInputs(tokens, last, length, slots)

    # --- what is captured ---------------------------------------------------------------------------------------------

    def _work(self, inputs: PrefillInputs) -> PrefillOutput:
        with with_plans(inputs.tokens.shape[0]):
            return self._pass(inputs)

    def _pass(self, inputs: PrefillInputs) -> PrefillOutput:
        model, options = self._model, self._options
        batch = self._later_batch(inputs) if inputs.context else self._first_batch(inputs)
        states = model.run_layers(
            model.embed(inputs.tokens), batch, self._ops, options.feature_layers, last=options.last_layer
        )
        shown = states.hidden_states if options.want_hidden else states.hidden_states[inputs.last]
        hidden = model.norm(shown, self._ops)
        last = hidden[inputs.last] if options.want_hidden else hidden
        logits = logits_of(last, model, options)
        return PrefillOutput(logits, hidden if options.want_hidden else None, states.features)

    def _first_batch(self, inputs: PrefillInputs) -> EagerBatch:
        by_window = {window: AttentionSpans([self._first_span(inputs, window)]) for window in self._windows}
        return EagerBatch(self._rotations(slice(inputs.tokens.shape[0])), by_window)

    def _first_span(self, inputs: PrefillInputs, window: int | None) -> SequenceSpan:
        size = inputs.tokens.shape[0]
        steps = torch.arange(size, device=self._kv.device)
        mask = None if window is None or size <= window else self._additive(_hidden(steps, steps, window))
        slots = inputs.of(window).new
        return SequenceSpan(0, size, 0, slots, slots, mask)

    def _later_batch(self, inputs: PrefillInputs) -> EagerBatch:
        steps = torch.arange(inputs.tokens.shape[0], device=self._kv.device)
        positions = (inputs.length + steps).clamp_max(self._rope_caches[0].shape[0] - 1)
        by_window = {window: AttentionSpans([self._later_span(inputs, window)]) for window in self._windows}
        return EagerBatch(self._rotations(positions), by_window)

    def _later_span(self, inputs: PrefillInputs, window: int | None) -> SequenceSpan:
        """Keys are the padded context, or what windows see of it, and then the chunk: a mask hides the padding."""
        size, context, device = inputs.tokens.shape[0], inputs.context, self._kv.device
        steps, places = torch.arange(size, device=device), torch.arange(context, device=device)
        slots, new = inputs.of(window).context, inputs.of(window).new
        if window is not None:
            places = inputs.length - min(window - 1, context) + places[: window - 1]
            slots = slots[places.clamp_min(0)]
        hidden = _hidden(places, inputs.length + steps, window) | (places < 0) | (places >= inputs.length)
        mask = self._additive(torch.cat([hidden, _hidden(steps, steps, window)], dim=1))
        return SequenceSpan(0, size, places.shape[0], torch.cat([slots, new]), new, mask)

    def _additive(self, hidden: Tensor) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._kv.dtype, device=hidden.device)
        return mask.masked_fill(hidden, -torch.inf)

    def _rotations(self, positions: Tensor | slice) -> tuple[CosSin, ...]:
        return tuple(cos_sin(cache, positions, self._kv.dtype) for cache in self._rope_caches)


def _hidden(keys: Tensor, nodes: Tensor, window: int | None) -> Tensor:
    """Which keys are behind a node or before its window, by position: [nodes, keys]."""
    behind = keys > nodes[:, None]
    return behind if window is None else behind | (keys <= nodes[:, None] - window)


def _slots(group: LayerGroup, seq_cache: SequenceCache, start: int, end: int) -> Tensor:
    slots = group.slots(seq_cache, start, end)
    return torch.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots


def _fits(row: Row) -> bool:
    """Whether the context of every chunk of a row has a graph."""
    last = row.seq_cache.length + (len(row.parents) - 1) // SIZES[-1] * SIZES[-1]
    return last <= CONTEXTS[-1]


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None
