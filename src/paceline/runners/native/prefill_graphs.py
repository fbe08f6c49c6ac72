"""Graphs of first prefills.

A prompt of a few hundred tokens is little work for a GPU, but hundreds of launches for its host, and all other
sequences wait meanwhile. Here the first prefill of a sequence is one graph: padded to a fixed size, since no token sees
the padding after it, which is stored in a block that belongs to no sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.types import ModelOutput, Row
from paceline.device.graphs import GraphCache, GraphPool, rounded_up
from paceline.layers.attention import EagerBatch, SequenceSpan
from paceline.layers.ops import EagerOps
from paceline.layers.rope import cos_sin
from paceline.models.decoder import DecoderModel
from paceline.runners.native.kv_cache import KVCache
from paceline.runners.native.outputs import OutputOptions, logits_of

SIZES = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # tokens
MIN_TOKENS = 3  # fewer are a decode pass
MAX_GRAPHS = 64


@dataclass(frozen=True, slots=True)
class PrefillKey:
    """What a prefill is captured for."""

    tokens: int
    want_hidden: bool
    feature_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PrefillInputs:
    """The fixed tensors a graph reads."""

    tokens: Tensor  # int64 [size]
    slots: Tensor  # int64 [size]
    last: Tensor  # int64 [1]


@dataclass(frozen=True, slots=True, eq=False)
class PrefillOutput:
    """Tensors of the graph, to be copied before the next prefill."""

    logits: Tensor  # [1, vocab] after the last token
    hidden: Tensor | None  # [size, …] padding included
    features: Tensor | None


class PrefillGraphs:
    """First prefills of single sequences, captured by size on first use."""

    def __init__(
        self,
        model: DecoderModel,
        kv: KVCache,
        ops: EagerOps,
        rope_cache: Tensor,
        options: OutputOptions,
        pool: GraphPool,
    ) -> None:
        self._model, self._kv, self._ops, self._options = model, kv, ops, options
        self._rope_cache = rope_cache
        self._graphs: GraphCache[PrefillKey, PrefillInputs, PrefillOutput] = GraphCache(pool, MAX_GRAPHS)

    def fits(self, rows: list[Row], last_only: bool) -> bool:
        """Whether all rows are first prefills of a size there is a graph for."""
        return last_only and all(
            row.seq_cache.length == 0 and row.is_chain and MIN_TOKENS <= len(row.parents) <= SIZES[-1] for row in rows
        )

    def forward(self, rows: list[Row]) -> ModelOutput:
        """Prefill row by row."""
        outputs = [self._read(row) for row in rows]
        return outputs[0] if len(outputs) == 1 else ModelOutput.of([row for output in outputs for row in output])

    def _read(self, row: Row) -> ModelOutput:
        tokens, count = row.ids(), len(row.parents)
        slots = self._kv.slots(row.seq_cache, 0, count)
        flat = torch.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots
        graph = self._graphs.get(self._key(count), lambda: self._inputs(count), self._work)
        inputs = graph.buffers
        inputs.tokens[:count].copy_(tokens, non_blocking=True)
        inputs.slots[:count].copy_(flat, non_blocking=True)
        inputs.slots[count:] = self._kv.padding_slot
        inputs.last.fill_(count - 1)
        output = graph.run()
        hidden, features = (None if part is None else part[:count].clone() for part in (output.hidden, output.features))
        return ModelOutput(output.logits.clone(), [1], hidden, features, [count])

    def _key(self, count: int) -> PrefillKey:
        size = rounded_up(count, SIZES)
        assert size is not None
        return PrefillKey(size, self._options.want_hidden, self._options.feature_layers)

    def _inputs(self, count: int) -> PrefillInputs:
        """Capture runs the pass, so every slot is padding at first: it must not write into a sequence."""
        size, device = self._key(count).tokens, self._kv.device
        tokens = torch.zeros(size, dtype=torch.int64, device=device)
        slots = torch.full_like(tokens, self._kv.padding_slot)
        return PrefillInputs(tokens, slots, torch.zeros(1, dtype=torch.int64, device=device))

    def _work(self, inputs: PrefillInputs) -> PrefillOutput:
        model, options, size = self._model, self._options, inputs.tokens.shape[0]
        rotation = cos_sin(self._rope_cache, slice(size), self._kv.keys.dtype)
        batch = EagerBatch(rotation, [SequenceSpan(0, size, 0, inputs.slots, inputs.slots, None)])
        states = model.run_layers(
            model.embed(inputs.tokens), batch, self._ops, options.feature_layers, last=options.last_layer
        )
        shown = states.hidden_states if options.want_hidden else states.hidden_states[inputs.last]
        hidden = model.norm(shown, self._ops)
        last = hidden[inputs.last] if options.want_hidden else hidden
        logits = logits_of(last, model, options)
        return PrefillOutput(logits, hidden if options.want_hidden else None, states.features)
