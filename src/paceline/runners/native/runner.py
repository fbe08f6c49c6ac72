"""The native runner: a model of models/ over a paged cache. Eager passes everywhere, graphs on CUDA."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.core.draft_vocabulary import MULTIPLE
from paceline.core.looped_steps import ChainLimits, LoopedSteps, LoopInput, PlainGroups
from paceline.core.protocols import Adapter, LoopSource, Preparation
from paceline.core.state_view import StateView, all_layers
from paceline.core.types import Capability, DraftInput, DraftOutput, ModelInfo, ModelOutput, Row, RowOutput, WarmupPlan
from paceline.device.graphs import GraphPool
from paceline.device.properties import on_host, supports_graphs
from paceline.errors import CapabilityError, OptionError, OutOfMemory
from paceline.kv.block_manager import BlockManager
from paceline.kv.window_blocks import PASS_TOKENS
from paceline.layers.rope import rope_cache
from paceline.models.decoder import DecoderModel
from paceline.runners.loading import eos_token_ids_of
from paceline.runners.native.catching_up import CATCH_UP_WIDTHS, LEAD_TOKENS, QuickReading, catch_up_passes
from paceline.runners.native.eager_pass import EagerPasses
from paceline.runners.native.kv_cache import KVCache, PagedRunner, block_manager, own
from paceline.runners.native.loading import (
    can_fuse,
    default_cache_tokens,
    eos_token_ids_in,
    load_folder,
    load_from_model,
    model_info,
    read_config,
)
from paceline.runners.native.outputs import OutputOptions, joined
from paceline.runners.native.prefill_graphs import PrefillGraphs

if TYPE_CHECKING:
    from paceline.runners.native.decode_graphs import DecodeGraphs
    from paceline.runners.native.step_loops import StepLoops

DECODE_STEPS = 4  # plain steps in a row: the host's work is shared by four, and no output waits long
SHORT_DECODE_STEPS = 8  # the same where a pass is one kernel: it takes about a millisecond
EXTRA_POSITIONS = 512  # a drafting graph may run a few steps past the end of the longest sequence
REREAD_TOKENS = 2048  # of a sequence in a pass, where its state or its window is computed again
CAPABILITIES = frozenset({Capability.TREE, Capability.HIDDEN_STATES, Capability.EARLY_EXIT})
RECURRENT_CAPABILITIES = frozenset({Capability.HIDDEN_STATES})  # a state is after one path, and after all layers


class NativeRunner(PagedRunner):
    """A model of a registered architecture behind `Runner`. `load` and `of_model` make one.

    blocks           the blocks of its KV cache; the runner owns the tensors behind them
    batch_invariant  on CUDA, a token's logits do not depend on what else is in the pass, in the largest batch neither
    rounded_kv       keys and values are kept in eight bits; the output is then not that of the model
    """

    _whole: NativeRunner | None = None  # of an early exit: the runner of all layers

    def __init__(
        self,
        model: DecoderModel,
        info: ModelInfo,
        blocks: BlockManager,
        *,
        batch_invariant: bool = False,
        rounded_kv: bool = False,
    ) -> None:
        self.model, self.info, self.blocks, self.batch_invariant = model, info, blocks, batch_invariant
        self.kv = KVCache(model.config, blocks, model.embedding.dtype, torch.device(info.device), rounded=rounded_kv)
        self.options = OutputOptions(last_layer=model.config.num_layers)
        self.capabilities = RECURRENT_CAPABILITIES if model.config.recurrent_layers else CAPABILITIES
        positions = model.config.max_seq_len + EXTRA_POSITIONS
        self._rope_caches = tuple(rope_cache(rope, positions, self.kv.device) for rope in model.config.ropes)
        self._make_passes()
        if self.decode_graphs is not None:
            self.info = replace(info, rows_rounded_alike=self.decode_graphs.persistent_rows)
            self.decode_steps = DECODE_STEPS if self.info.rows_rounded_alike is None else SHORT_DECODE_STEPS
            if batch_invariant:
                self.capabilities |= {Capability.BATCH_INVARIANT}

    def _make_passes(self) -> None:
        """Eager passes, and graphs where there are any. Graphs know the options of the runner they are made for."""
        parts = (self.model, self.kv)
        self.eager = EagerPasses(*parts, self._rope_caches, self.options)
        self.prefill_graphs = self._new_prefill_graphs()
        self.decode_graphs = self._new_decode_graphs()

    def _new_prefill_graphs(self) -> PrefillGraphs | None:
        if not supports_graphs(self.kv.device) or self.model.quantizes_input:
            return None
        if not all(layer.can_capture for layer in self.model.layers):
            return None
        pool = GraphPool("a prefill", self.kv.device)
        return PrefillGraphs(self.model, self.kv, self.eager.ops, self._rope_caches, self.options, pool)

    def _new_decode_graphs(self) -> DecodeGraphs | None:
        if not can_fuse(self.model, self.kv.device, self.kv.dtype):
            return None
        from paceline.runners.native.decode_graphs import DecodeGraphs

        pool, invariant = GraphPool("a decode pass", self.kv.device), self.batch_invariant
        return DecodeGraphs(self.model, self.kv, self._rope_caches, self.options, pool, batch_invariant=invariant)

    # --- making a runner ----------------------------------------------------------------------------------------------

    @classmethod
    def load(
        cls,
        folder: Path,
        name: str,
        dtype: str,
        device: str,
        kv_cache_tokens: int | None = None,
        *,
        batch_invariant: bool = False,
        rounded_kv: bool = False,
    ) -> NativeRunner:
        """Read a Hugging Face directory. dtype: a floating-point type, or a weight format of quantization/."""
        config = read_config(folder, name)
        model = load_folder(folder, config, dtype, device)
        info = model_info(name, model.config, eos_token_ids_in(folder, config), device, dtype)
        blocks = block_manager(kv_cache_tokens or default_cache_tokens(model.config))
        return cls(model, info, blocks, batch_invariant=batch_invariant, rounded_kv=rounded_kv)

    @classmethod
    def of_model(
        cls,
        model: Any,
        name: str,
        kv_cache_tokens: int | None = None,
        *,
        batch_invariant: bool = False,
        weight_format: str | None = None,
        rounded_kv: bool = False,
    ) -> NativeRunner:
        """Run a loaded transformers model. weight_format: convert its linear layers to a format of quantization/."""
        first = next(model.parameters())
        native = load_from_model(model, weight_format)
        dtype = weight_format or str(first.dtype).removeprefix("torch.")
        info = model_info(name, native.config, eos_token_ids_of(model), str(first.device), dtype)
        blocks = block_manager(kv_cache_tokens or default_cache_tokens(native.config))
        return cls(native, info, blocks, batch_invariant=batch_invariant, rounded_kv=rounded_kv)

    def preparations(self, plan: WarmupPlan) -> list[Preparation]:
        """Its graphs; nothing where there are none."""
        context = min(plan.max_context, self.info.max_seq_len, self.kv.num_tokens)
        bounded = replace(plan, max_context=context, widths=self._widths(plan))
        prefills = [] if self.prefill_graphs is None else self.prefill_graphs.preparations(context)
        passes = [] if self.decode_graphs is None else self.decode_graphs.preparations(bounded)
        return [torch.inference_mode()(prepare) for prepare in prefills + passes]

    def _widths(self, plan: WarmupPlan) -> tuple[int, ...]:
        """A draft model whose pass is one kernel also reads what it lacks of sequences in narrow passes."""
        if not plan.num_draft_tokens or self.decode_graphs is None or self.decode_graphs.persistent_rows is None:
            return plan.widths
        return tuple(sorted({*plan.widths, *CATCH_UP_WIDTHS}))

    # --- passes -------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, rows: list[Row], *, last_only: bool = False) -> ModelOutput:
        if self.model.config.recurrent_layers:
            self._check_chains(rows)
        if last_only and self.kv.windowed is not None and sum(len(row.parents) for row in rows) > PASS_TOKENS:
            return ModelOutput.of([self._read_in_parts(row) for row in rows])
        if not self._reread(rows):
            return ModelOutput.of([self.forward([row], last_only=last_only)[0].clone() for row in rows])
        self.kv.reserve_rows(rows)
        try:
            output = self._dispatch(rows, last_only)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory("a pass does not fit: run fewer sequences at a time, or shorter ones") from error
        for row in rows:
            self._remember(row)
            _advance(row, len(row.parents))
        return output

    def _remember(self, row: Row, further: Tensor | None = None) -> None:
        """The tokens of a row, and those read after it, in case that a window must be read again."""
        if self.kv.windowed is not None:
            start, history = row.seq_cache.length, own(row.seq_cache).recurrent.history
            history.add(start, row)
            if further is not None:
                history.extend(start + len(row.parents), further)

    def _read_in_parts(self, row: Row) -> RowOutput:
        """A long row: the cache of windows need not hold all of it. Cut at blocks: results do not depend on it."""
        cache, outputs = own(row.seq_cache), list[RowOutput]()
        start, tokens = cache.length, row.ids()
        first = min(len(tokens), PASS_TOKENS - start % self.kv.block_size)
        later = tokens[first:].split(PASS_TOKENS) if len(tokens) > first else ()
        try:
            for part in (tokens[:first], *later):
                outputs.append(self.forward([Row.chain(cache, part)], last_only=True)[0].clone())
        except OutOfMemory:
            self.truncate(cache, start)
            raise
        cache.last_row_start = start
        return joined(outputs)

    def _settle(self, rows: list[Row]) -> bool:
        """What plain decoding has written stays. False: see `_reread`."""
        for cache in [own(row.seq_cache) for row in rows if self.model.config.recurrent_layers]:
            self.kv.states.settle(cache.recurrent, cache.length)
        return self._reread(rows)

    def _check_chains(self, rows: list[Row]) -> None:
        if not all(row.is_chain for row in rows):
            raise CapabilityError(f"{self.info.name} reads chains of draft tokens only, not trees")

    def _reread(self, rows: list[Row]) -> bool:
        """Read again what states or windows lack of a sequence that was cut back, or forked from another.

        False: windows do not fit together, and one was read at the cost of another.
        """
        lacking = [own(row.seq_cache) for row in rows if self.kv.lacks(own(row.seq_cache))]
        if lacking:
            self.kv.touch(rows)
        for cache in lacking:
            length, tokens, start = cache.length, cache.recurrent.history.ids(), self.kv.first_lacking(cache)
            self.kv.make_writable(cache, start, length)
            try:
                cache.length = start
                while cache.length < length:
                    chunk = tokens[cache.length : min(length, cache.length + REREAD_TOKENS)]
                    self._all_layers.forward([Row.chain(cache, chunk)], last_only=True)
            finally:
                cache.length = length
        if not lacking or self.kv.windowed is None:  # a pass finds out by itself whether all states have a slot
            return True
        return not any(self.kv.lacks(own(row.seq_cache)) for row in rows)

    @property
    def _all_layers(self) -> NativeRunner:
        """The runner without an early exit."""
        return self if self._whole is None else self._whole

    def _dispatch(self, rows: list[Row], last_only: bool) -> ModelOutput:
        """The first pass that takes these rows: decode graph, prefill graph, row by row, eager."""
        if self.decode_graphs is not None and (size := self.decode_graphs.fits_rows(rows, last_only)) is not None:
            return self.decode_graphs.forward(rows, size, last_only)
        if self.prefill_graphs is not None and self.prefill_graphs.fits(rows, last_only):
            return self.prefill_graphs.forward(rows)
        if self.batch_invariant and len(rows) > 1:  # the library's products round by how many rows there are
            return ModelOutput.of([self._dispatch([row], last_only)[0].clone() for row in rows])
        return self.eager.forward(rows, last_only)

    @torch.inference_mode()
    def draft(self, inputs: list[DraftInput], num_tokens: int) -> DraftOutput | None:
        if self.model.config.recurrent_layers:
            return None
        sampled = inputs[0].temperature > 0
        if any((draft.temperature > 0) != sampled or len(draft.ids) < LEAD_TOKENS for draft in inputs):
            return None
        longest = max(len(draft.ids) for draft in inputs) + num_tokens
        size = None if self.decode_graphs is None else self.decode_graphs.fits(len(inputs), LEAD_TOKENS, longest)
        if size is None or self.decode_graphs is None:
            return None
        self._restart(inputs)
        self._catch_up(inputs)
        if any(self.kv.lacks(own(draft.seq_cache)) for draft in inputs):
            return None
        graph = self.decode_graphs.draft_graph(size, num_tokens, sampled)
        self._reserve_drafts(inputs, graph.key.num_tokens)
        output = self.decode_graphs.draft(graph, inputs, num_tokens)
        for index, draft in enumerate(inputs):
            if self.kv.windowed is not None:
                lead = draft.ids[draft.seq_cache.length :]
                self._remember(Row.chain(draft.seq_cache, lead), output.tokens[index, :-1])
            draft.seq_cache.length = len(draft.ids) + num_tokens - 1
        return output

    @torch.inference_mode()
    def decode(self, rows: list[Row], num_steps: int) -> Tensor | None:
        if not self._settle(rows):
            return None
        longest = max(row.seq_cache.length for row in rows) + num_steps
        size = None if self.decode_graphs is None else self.decode_graphs.fits(len(rows), 1, longest)
        if size is None or self.decode_graphs is None or longest > self.info.max_seq_len:
            return None
        try:
            self.kv.reserve_rows(rows, num_steps)
        except OutOfMemory:
            return None
        try:
            written = self.decode_graphs.decode(rows, size, num_steps)
        except torch.OutOfMemoryError:  # of a capture: step by step there is another way
            return None
        for row, tokens in zip(rows, written):
            self._remember(row, tokens[:-1])
            _advance(row, num_steps)
        return written

    def draft_loop(self, source: LoopSource, inputs: list[LoopInput], num_steps: int) -> LoopedSteps | None:
        loops = self._step_loops()
        return None if loops is None else loops.drafted(source, inputs, num_steps)

    def plain_loop(self, inputs: list[LoopInput], num_steps: int) -> PlainGroups | None:
        loops = self._step_loops()
        return None if loops is None else loops.plain(inputs, num_steps)

    def loop_source(self, limits: Callable[[], ChainLimits] | None = None) -> LoopSource | None:
        loops = self._step_loops()
        return None if loops is None else loops.source(self._catch_up, limits)

    def _step_loops(self) -> StepLoops | None:
        """None: this model cannot go on without the host."""
        config, options = self.model.config, self.options
        # All that a pass writes must be keys and values of its own layers, which the next pass may write again.
        plain = not config.recurrent_layers and self.kv.windowed is None and options.adapter is None
        if self.decode_graphs is None or not plain or options.last_layer < config.num_layers:
            return None
        from paceline.runners.native.step_loops import StepLoops

        return StepLoops(self.decode_graphs, self.kv, self.info.max_seq_len, self.info.vocab_size)

    def _restart(self, inputs: list[DraftInput]) -> None:
        """Sequences that lack a part of their window are read from the beginning."""
        for draft in inputs:
            cache = own(draft.seq_cache)
            cache.length = min(cache.length, len(draft.ids) - LEAD_TOKENS)
            if self.kv.lacks(cache):
                self.truncate(cache, 0)

    def _catch_up(self, inputs: list[DraftInput]) -> None:
        graphs = self.decode_graphs
        quick = QuickReading() if graphs is None else QuickReading.of(len(inputs), graphs.persistent_rows)
        for part in catch_up_passes(inputs, quick):
            self.forward(part.rows, last_only=not part.is_quick)

    def _reserve_drafts(self, inputs: list[DraftInput], num_tokens: int) -> None:
        for draft in inputs:
            cache = own(draft.seq_cache)
            cache.length = min(cache.length, len(draft.ids) - LEAD_TOKENS)
            self.kv.reserve(cache, cache.length, len(draft.ids) + num_tokens)
        self.kv.reserve_windows({draft.seq_cache: len(draft.ids) + num_tokens for draft in inputs})

    # --- for drafters that read the target's states -------------------------------------------------------------------

    def expose(self, *, hidden: bool = False, features: tuple[int, ...] = ()) -> StateView:
        options = self.options
        options.want_hidden = options.want_hidden or hidden
        options.feature_layers = all_layers(options.feature_layers, features)
        return StateView(features, lambda: options.feature_layers)

    def hidden_view(self) -> NativeRunner:
        """Eager passes only: the view reads a prompt now and then, and graphs would hold memory."""
        view = copy.copy(self)
        view.options = OutputOptions(self.model.config.num_layers, want_hidden=True)
        view.eager = EagerPasses(self.model, self.kv, self._rope_caches, view.options)
        view.prefill_graphs = view.decode_graphs = None
        return view

    def lm_head(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)

    def limit_logits(self, vocab_rows: int) -> bool:
        """On CPUs. Graphs on a GPU are captured with all rows; chains of draft tokens in them are told otherwise."""
        if not on_host(self.kv.device) or self.model.lm_head.first_rows(MULTIPLE) is None:
            return False
        self.options.vocab_rows = vocab_rows
        return True

    def embed(self, tokens: Tensor) -> Tensor:
        return self.model.embed(tokens.to(self.kv.device))

    def early_exit(self, layer: int, adapter: Adapter | None = None) -> NativeRunner:
        if Capability.EARLY_EXIT not in self.capabilities:
            raise CapabilityError(f"{self.info.name} cannot {Capability.EARLY_EXIT.value}")
        if not 0 < layer < self.info.num_layers:
            raise OptionError(f"an exit is after layer 1 to {self.info.num_layers - 1}, not {layer}")
        twin = copy.copy(self)
        twin._whole = self._all_layers
        twin.options = OutputOptions(layer, want_hidden=True, adapter=adapter)
        twin._make_passes()
        return twin


def _advance(row: Row, num_tokens: int) -> None:
    """The cache of a row now holds so many more tokens."""
    cache = own(row.seq_cache)
    cache.last_row_start = cache.length
    cache.length += num_tokens
