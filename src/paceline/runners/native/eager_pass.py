"""Eager passes: every device, every kind of row. Also the passes that take an early exit and that resume from one."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from paceline.core.types import ModelOutput, Row
from paceline.device.properties import on_host
from paceline.layers.attention import AttentionSizes, EagerAttention
from paceline.layers.lora import LoraRows
from paceline.layers.ops import EagerOps
from paceline.models.decoder import DecoderModel, LayerOutput
from paceline.runners.native.attention_metadata import BatchBuilder
from paceline.runners.native.compiled_pass import CompiledLayers, CompiledOps, LayerSpan
from paceline.runners.native.early_exit import EarlyExitState, common_layer, merged
from paceline.runners.native.kv_cache import KVCache, own
from paceline.runners.native.outputs import OutputOptions, model_output


def attention_sizes(model: DecoderModel, kv: KVCache) -> AttentionSizes:
    config = model.config
    return AttentionSizes(config.num_heads, config.num_kv_heads, config.head_dim, kv.block_size)


class EagerPasses:
    """Passes of one model through eager operations."""

    def __init__(
        self,
        model: DecoderModel,
        kv: KVCache,
        rope_caches: tuple[Tensor, ...],
        options: OutputOptions,
        *,
        lora_rows: LoraRows | None = None,
    ) -> None:
        """lora_rows: where the layers of the model look which rows have an adapter."""
        self._lora_rows, self._states = lora_rows, kv.states
        self._model, self._options, self._device = model, options, kv.device
        by_node = model.quantizes_input
        attention = EagerAttention(attention_sizes(model, kv), kv.caches, node_by_node=by_node)
        self._builder = BatchBuilder(kv, attention, rope_caches, model.config.windows)
        self._compiled = CompiledLayers.of(model, kv, rope_caches[0])
        ops = EagerOps if self._compiled is None else CompiledOps
        self.ops = ops(attention, model.config.rms_norm_eps)

    def forward(self, rows: list[Row], last_only: bool) -> ModelOutput:
        """Read all rows, packed, in one pass."""
        sizes = [len(row.parents) for row in rows]
        layer = self._resume_layer(rows)
        states = self._from_start(rows, last_only) if layer is None else self._resumed(rows, sizes, layer)
        return model_output(states, sizes, last_only, self._model, self._options, self.ops)

    @property
    def _exits_early(self) -> bool:
        return self._options.last_layer < self._model.config.num_layers

    def _resume_layer(self, rows: list[Row]) -> int | None:
        """The layer that an exit has left these rows at; None: they are read from the first layer."""
        if self._exits_early or self._options.feature_layers:
            return None
        return common_layer([own(row.seq_cache).exit_state for row in rows])

    def _from_start(self, rows: list[Row], last_only: bool) -> LayerOutput:
        model, options = self._model, self._options
        tokens, span = self._tokens(rows), LayerSpan(0, options.last_layer, options.feature_layers)
        states = self._run(model.embed(tokens), rows, span, prefill=last_only)
        self._keep_exit_states(rows, tokens, states.hidden_states)
        return states

    def _run(
        self,
        hidden_states: Tensor,
        rows: list[Row],
        span: LayerSpan,
        *,
        skips: list[int] | None = None,
        prefill: bool = False,
    ) -> LayerOutput:
        """Layers over the rows, but for the `skips` nodes at the start of each: compiled where they are."""
        if self._lora_rows is not None:
            skipped = skips or [0] * len(rows)
            counts = [len(row.parents) - skip for row, skip in zip(rows, skipped)]
            self._lora_rows.begin([row.seq_cache.lora for row in rows], counts)
        elif self._compiled is not None:
            return self._compiled.run(hidden_states, rows, span, skips or [0] * len(rows))
        batch = self._builder.batch(rows, skips, prefill=prefill)
        with self._states.reading(rows, [own(row.seq_cache).recurrent for row in rows]) as state_spans:
            batch = replace(batch, recurrent=self._states.recurrence(state_spans))
            return self._model.run_layers(
                hidden_states, batch, self.ops, span.features, first=span.first, last=span.last
            )

    def _tokens(self, rows: list[Row]) -> Tensor:
        ids = [row.ids() if row.tokens.device == self._device else row.ids().to(self._device) for row in rows]
        return torch.cat(ids) if len(ids) > 1 else ids[0]

    def _keep_exit_states(self, rows: list[Row], tokens: Tensor, hidden_states: Tensor) -> None:
        """An exit keeps its states for verification; every other pass makes earlier ones worthless."""
        start, keeps = 0, self._exits_early and on_host(self._device)
        for row in rows:
            cache, nodes = own(row.seq_cache), slice(start, start + len(row.parents))
            start = nodes.stop
            if not keeps or not row.is_chain:
                cache.exit_state = None
                continue
            if cache.exit_state is None or cache.exit_state.end != cache.length:
                cache.exit_state = EarlyExitState(self._options.last_layer, cache.length)
            cache.exit_state.add(tokens[nodes], hidden_states[nodes])

    def _resumed(self, rows: list[Row], sizes: list[int], layer: int) -> LayerOutput:
        """Lower layers over what the exit has not read, then the upper layers over every node."""
        model, exits = self._model, [own(row.seq_cache).exit_state for row in rows]
        reused = [None if state is None else state.matching(row) for state, row in zip(exits, rows)]
        skips = [0 if states is None else states.shape[0] for states in reused]
        for row in rows:
            own(row.seq_cache).exit_state = None
        tokens = torch.cat([row.ids()[skip:] for row, skip in zip(rows, skips)])
        lower = self._run(model.embed(tokens), rows, LayerSpan(0, layer), skips=skips)
        hidden_states = merged(reused, lower.hidden_states, sizes)
        return self._run(hidden_states, rows, LayerSpan(layer, model.config.num_layers))
