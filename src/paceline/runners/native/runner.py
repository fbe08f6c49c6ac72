"""The native runner: paged cache, packed rows, plain passes everywhere, captured passes on CUDA."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.core.protocols import Adapter, Runner
from paceline.core.types import Capability, DraftInput, DraftOutput, ModelInfo, ModelOutput, Row, SequenceCache
from paceline.device.graphs import new_pool
from paceline.errors import OptionError, OutOfMemory
from paceline.kv.block_manager import BlockManager
from paceline.runners.native import quantization
from paceline.runners.native.attention_metadata import Layout, place_of
from paceline.runners.native.config import Shape, rotary_table, shape_of
from paceline.runners.native.eager_ops import EagerOps
from paceline.runners.native.early_exit import Ahead, common_layer, merged
from paceline.runners.native.kv_cache import BLOCK_SIZE, NativeSequenceCache, empty_blocks, own
from paceline.runners.native.loading import (
    can_fuse,
    config_of,
    default_cache_tokens,
    eos_token_ids_in,
    model_info,
    pack_weights,
)
from paceline.runners.native.model import States, run_layers
from paceline.runners.native.weights import Weights, load_weights, weights_of

if TYPE_CHECKING:
    from paceline.runners.native.decode_graphs import Check, DecodeGraphs, Size
    from paceline.runners.native.prefill_graphs import PrefillGraphs

DECODE_STEPS = 4  # plain steps in a row: the host's work is shared by four, and no output waits long
SLACK = 512  # a drafting loop may run a few steps past the end of the longest sequence
WIDEST_NARROW = 512  # nodes in a captured pass, over all sequences
LEAD_TOKENS = 2  # what a drafting loop reads of a sequence; narrow.LEAD, known here without importing Triton


class NativeRunner(Runner):
    """A Llama-like model behind `Runner`. See `load` and `of_model` for how to get one.

    batch_invariant: on CUDA, a token's logits do not depend on what else is in the pass, in the largest batch neither.
    """

    def __init__(
        self,
        shape: Shape,
        weights: Weights,
        config: Any,
        info: ModelInfo,
        kv_cache_tokens: int,
        *,
        batch_invariant: bool = False,
    ) -> None:
        self.batch_invariant = batch_invariant
        self.shape, self.weights, self.info = shape, weights, info
        self.capabilities = frozenset({Capability.TREE, Capability.HIDDEN_STATES, Capability.EARLY_EXIT})
        self.device = torch.device(info.device)
        blocks = max(1, -(-kv_cache_tokens // BLOCK_SIZE))
        kept = weights.embedding.dtype
        self.scratch = blocks * BLOCK_SIZE  # behind the last block, on a block of its own: what pads a prompt
        size = (shape.layers, self.scratch + BLOCK_SIZE, shape.num_kv_heads, shape.head_dim)
        try:
            self.keys, self.values = (empty_blocks(size, kept, self.device) for _ in range(2))
        except (torch.OutOfMemoryError, OSError, RuntimeError) as error:
            raise OutOfMemory(f"a cache of {kv_cache_tokens} tokens does not fit: lower --cache-tokens") from error
        self.blocks = BlockManager(blocks, BLOCK_SIZE)  # last: of a cache that does not fit not even the list may
        self.rope_cache = rotary_table(config, shape.max_seq_len + SLACK, self.device)
        by_node = quantization.rounds_inputs(weights.head)
        self.plain = EagerOps(shape, self.keys, self.values, node_by_node=by_node)
        self._layout = Layout(self.blocks, self.plain, self.rope_cache, kept)
        self.narrow = self._narrow_passes() if self.device.type == "cuda" else None
        self.prompts = self._prompt_passes() if self.device.type == "cuda" else None
        if self.narrow is not None:
            self.decode_steps = DECODE_STEPS
        self.last_layer = shape.layers
        self.adapter: Adapter | None = None  # of an exit: what its states go through on their way to the head
        self.want_hidden = False
        self.feature_layers: tuple[int, ...] = ()

    # --- making one ---------------------------------------------------------------------------------------------------

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
    ) -> NativeRunner:
        """Read a Hugging Face directory. dtype: float32, bfloat16, float16, int8 or int4."""
        config = config_of(folder, name)
        shape = shape_of(config)
        beside = torch.float32 if device == "cpu" else torch.bfloat16  # what is not a matrix
        kind = beside if dtype in quantization.WORDS else getattr(torch, dtype)
        weights = load_weights(folder, shape, kind, device)
        if dtype in quantization.WORDS:
            weights = pack_weights(weights, dtype)
        info = model_info(name, shape, eos_token_ids_in(folder, config), device, dtype)
        return cls(shape, weights, config, info, kv_cache_tokens or default_cache_tokens(shape), batch_invariant=batch_invariant)

    @classmethod
    def of_model(
        cls, model: Any, name: str, kv_cache_tokens: int | None = None, *, batch_invariant: bool = False
    ) -> NativeRunner:
        """Run a loaded transformers model of the family."""
        from paceline.runners.loading import eos_token_ids_of

        shape = shape_of(model.config)
        first = next(model.parameters())
        word = str(first.dtype).removeprefix("torch.")
        info = model_info(name, shape, eos_token_ids_of(model), str(first.device), word)
        with torch.no_grad():
            weights = weights_of(model, shape)
        room = kv_cache_tokens or default_cache_tokens(shape)
        return cls(shape, weights, model.config, info, room, batch_invariant=batch_invariant)

    # --- sequence caches --------------------------------------------------------------------------------------------------------

    def new_cache(self) -> NativeSequenceCache:
        return NativeSequenceCache()

    @torch.inference_mode()
    def commit(self, seq_cache: SequenceCache, nodes: list[int]) -> None:
        mine = own(seq_cache)
        moved = [(node, place) for place, node in enumerate(nodes) if node != place]
        if moved:
            table = self.blocks.table(mine)
            source = torch.tensor([place_of(table, mine.fresh + node) for node, _ in moved], device=self.device)
            target = torch.tensor([place_of(table, mine.fresh + place) for _, place in moved], device=self.device)
            for cache in (self.keys, self.values):
                cache[:, target] = cache[:, source]
        mine.length = mine.fresh + len(nodes)

    def truncate(self, seq_cache: SequenceCache, length: int) -> None:
        mine = own(seq_cache)
        mine.length, mine.ahead = min(mine.length, length), None
        self.blocks.shrink(mine, mine.length)

    def free(self, seq_cache: SequenceCache) -> None:
        mine = own(seq_cache)
        self.blocks.release(mine)
        mine.length, mine.ahead = 0, None

    def fork(self, seq_cache: SequenceCache, length: int) -> NativeSequenceCache:
        twin = NativeSequenceCache()
        self.blocks.share(own(seq_cache), twin, length)
        twin.length = length
        return twin

    def free_tokens(self) -> int:
        return self.blocks.free * BLOCK_SIZE

    # --- passes -------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, rows: list[Row], *, last_only: bool = False) -> ModelOutput:
        self._reserve(rows)
        try:
            output = self._pass(rows, last_only)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory("a pass does not fit: run fewer texts at a time, or shorter ones") from error
        for row in rows:
            mine = own(row.seq_cache)
            mine.fresh = mine.length
            mine.length += len(row.parents)
        return output

    def _pass(self, rows: list[Row], last_only: bool) -> ModelOutput:
        """The rows by the way that suits them: captured and narrow, captured first reads, or plain."""
        size = self._narrow_size(rows, last_only)
        if size is not None:
            return self._narrow_pass(rows, size, last_only)
        if last_only and self.prompts is not None and all(map(self._is_first_read, rows)):
            return self._first_reads(rows, self.prompts)
        if self.batch_invariant and len(rows) > 1:  # the library's products step by how many rows there are
            return ModelOutput.of([self._pass([row], last_only)[0].clone() for row in rows])
        return self._plain_pass(rows, last_only)

    def _is_first_read(self, row: Row) -> bool:
        assert self.prompts is not None
        return row.seq_cache.length == 0 and row.is_chain and self.prompts.fits(len(row.parents))

    def _first_reads(self, rows: list[Row], passes: PrefillGraphs) -> ModelOutput:
        read = []
        for row in rows:
            places = self._layout.places(own(row.seq_cache), 0, len(row.parents))
            flat = torch.arange(places.start, places.stop) if isinstance(places, slice) else places
            read.append(passes.read(row.ids(), flat))
        return read[0] if len(read) == 1 else ModelOutput.of([one for output in read for one in output])

    def _reserve(self, rows: list[Row], steps: int = 1) -> None:
        """Pages for every row and the tokens written after it, or OutOfMemory and nothing changed."""
        result: list[NativeSequenceCache] = []
        try:
            for row in rows:
                mine = own(row.seq_cache)
                result.append(mine)
                end = mine.length + len(row.parents) + steps - 1
                self.blocks.grow(mine, end)
                for clone in self.blocks.writable(mine, mine.length, end):
                    self._copy_block(clone.source, clone.target)
        except OutOfMemory:
            for mine in result:
                self.blocks.shrink(mine, mine.length)
            raise

    def _copy_block(self, source: int, target: int) -> None:
        for cache in (self.keys, self.values):
            cache[:, target * BLOCK_SIZE : (target + 1) * BLOCK_SIZE] = cache[:, source * BLOCK_SIZE : (source + 1) * BLOCK_SIZE]

    def _plain_pass(self, rows: list[Row], last_only: bool) -> ModelOutput:
        widths = [len(row.parents) for row in rows]
        layer = None if self.feature_layers else common_layer([own(row.seq_cache).ahead for row in rows])
        if self.last_layer < self.shape.layers or layer is None:
            tokens, batch = self._tokens(rows), self._layout.batch(rows, prompts=last_only)
            stream = self.weights.embedding[tokens]
            states = run_layers(self.weights, stream, batch, self.plain, self.feature_layers, last=self.last_layer)
            self._leave_ahead(rows, tokens, states.stream)
        else:
            states = self._resumed(rows, widths, layer)
        return self._said(states, widths, last_only)

    def _tokens(self, rows: list[Row]) -> Tensor:
        tokens = torch.cat([row.ids().to(self.device) for row in rows]) if len(rows) > 1 else rows[0].ids()
        return tokens.to(self.device)

    def _leave_ahead(self, rows: list[Row], tokens: Tensor, stream: Tensor) -> None:
        """An exit leaves its states for verification; every other pass makes what was left worthless."""
        start, leaves = 0, self.last_layer < self.shape.layers and self.device.type == "cpu"
        for row in rows:
            mine, here = own(row.seq_cache), slice(start, start + len(row.parents))
            start = here.stop
            if not leaves or not row.is_chain:
                mine.ahead = None
                continue
            if mine.ahead is None or mine.ahead.end != mine.length:
                mine.ahead = Ahead(self.last_layer, mine.length)
            mine.ahead.add(tokens[here], stream[here])

    def _resumed(self, rows: list[Row], widths: list[int], layer: int) -> States:
        """Lower layers over what the exit has not read, then the upper ones over every node."""
        left = [own(row.seq_cache).ahead for row in rows]
        known = [None if ahead is None else ahead.reaches(row) for ahead, row in zip(left, rows)]
        skips = [0 if states is None else states.shape[0] for states in known]
        for row in rows:
            own(row.seq_cache).ahead = None
        tokens = torch.cat([row.ids()[skip:] for row, skip in zip(rows, skips)])
        below = self._layout.batch(rows, skips)
        fresh = run_layers(self.weights, self.weights.embedding[tokens], below, self.plain, last=layer).stream
        stream = merged(known, fresh, widths)
        return run_layers(self.weights, stream, self._layout.batch(rows), self.plain, first=layer)

    def _said(self, states: States, widths: list[int], last_only: bool) -> ModelOutput:
        """Norm and head on what is asked for: with last_only on one node a row."""
        stream = states.stream
        if not last_only:
            hidden = self.plain.norm(stream, self.weights.final_norm)
            shown = hidden if self.want_hidden else None
            return ModelOutput(self.speak(hidden), widths, shown, states.features)
        ends = torch.tensor(list(itertools.accumulate(widths)), device=stream.device) - 1
        hidden = self.plain.norm(stream if self.want_hidden else stream[ends], self.weights.final_norm)
        last = hidden[ends] if self.want_hidden else hidden
        shown = hidden if self.want_hidden else None
        return ModelOutput(self.speak(last), [1] * len(widths), shown, states.features, widths)

    def speak(self, hidden: Tensor) -> Tensor:
        """States behind the final norm -> logits; of an exit, through its adapter."""
        return self.lm_head(hidden if self.adapter is None else self.adapter(hidden))

    # --- narrow passes, on CUDA ---------------------------------------------------------------------------------------

    def _narrow_passes(self) -> DecodeGraphs | None:
        """Fused, captured passes; None where this machine or this model cannot have them."""
        if not can_fuse(self.shape, self.weights):
            return None
        from paceline.runners.native.decode_graphs import DecodeGraphs
        from paceline.runners.native.triton_ops import TritonOps

        longest = min(self.shape.max_seq_len, self.blocks.num_blocks * BLOCK_SIZE) + SLACK
        checks = TritonOps(self.shape, self.keys, self.values, self.rope_cache, BLOCK_SIZE, batch_invariant=self.batch_invariant)
        loops = TritonOps(self.shape, self.keys, self.values, self.rope_cache, BLOCK_SIZE, vectors=True)
        return DecodeGraphs(self, checks, loops, -(-longest // BLOCK_SIZE), new_pool())

    def _prompt_passes(self) -> PrefillGraphs:
        from paceline.runners.native.prefill_graphs import PrefillGraphs

        return PrefillGraphs(self, new_pool())

    def _narrow_size(self, rows: list[Row], last_only: bool) -> Size | None:
        """The captured size these rows fit into; None: a plain pass is the better or the only way."""
        nodes = max(len(row.parents) for row in rows)
        if self.narrow is None or (last_only and nodes > 2) or len(rows) * nodes > WIDEST_NARROW:
            return None
        return self.narrow.fits(len(rows), nodes, max(own(row.seq_cache).length for row in rows) + nodes)

    def _narrow_pass(self, rows: list[Row], size: Size, last_only: bool) -> ModelOutput:
        output = self._staged(rows, size).output([len(row.parents) for row in rows], last_only)
        return output if self.adapter is None else self._adapted(output)

    def _staged(self, rows: list[Row], size: Size) -> Check:
        """The captured pass of this size with these rows laid before it."""
        assert self.narrow is not None
        check = self.narrow.check(size)
        for index, row in enumerate(rows):
            check.staging.put_row(index, row, own(row.seq_cache).length, self.blocks.table(own(row.seq_cache)))
        check.staging.send(len(rows))
        for index, row in enumerate(rows):
            if row.tokens.is_cuda and row.tokens.shape[0]:
                first = len(row.parents) - row.tokens.shape[0]
                check.staging.token_ids[index, first : len(row.parents)].copy_(row.tokens)
        return check

    def _adapted(self, output: ModelOutput) -> ModelOutput:
        """A captured exit has spoken as it is; let its states speak through the adapter instead."""
        assert output.hidden is not None, "an exit hands out its states"
        states = output.hidden
        if output.read is not None:
            states = states[torch.tensor(list(itertools.accumulate(output.read)), device=states.device) - 1]
        return replace(output, logits=self.speak(states), best=None)

    @torch.inference_mode()
    def draft(self, inputs: list[DraftInput], steps: int) -> DraftOutput | None:
        sampled = inputs[0].temperature > 0
        if any((lead.temperature > 0) != sampled or len(lead.ids) < LEAD_TOKENS for lead in inputs):
            return None
        longest = max(len(lead.ids) for lead in inputs) + steps
        size = None if self.narrow is None else self.narrow.fits(len(inputs), LEAD_TOKENS, longest)
        if size is None or self.narrow is None:
            return None
        self._catch_up(inputs)
        loop = self.narrow.loop(size, steps, sampled)
        self._reserve_loop(inputs, loop.uniforms.shape[1])
        for index, lead in enumerate(inputs):
            loop.staging.put_lead(index, lead.ids, self.blocks.table(own(lead.seq_cache)))
        loop.staging.send(len(inputs))
        if sampled:
            loop.put_chances([lead.temperature for lead in inputs], [lead.uniforms or [] for lead in inputs])
        drafted = loop.run()
        for lead in inputs:
            lead.seq_cache.length = len(lead.ids) + steps - 1
        probs = None if drafted.probs is None else drafted.probs[: len(inputs), :steps]
        return DraftOutput(drafted.tokens[: len(inputs), :steps], probs)

    @torch.inference_mode()
    def decode(self, rows: list[Row], steps: int) -> Tensor | None:
        longest = max(own(row.seq_cache).length for row in rows) + steps
        size = None if self.narrow is None else self.narrow.fits(len(rows), 1, longest)
        if size is None or self.narrow is None or longest > self.shape.max_seq_len:
            return None
        try:
            self._reserve(rows, steps)
        except OutOfMemory:
            return None
        check = self._staged(rows, size)
        written = self.narrow.repeat(check, steps)[: len(rows)]
        for row in rows:
            mine = own(row.seq_cache)
            mine.fresh, mine.length = mine.length, mine.length + steps
        return written

    def _catch_up(self, inputs: list[DraftInput]) -> None:
        """Read all but the last two tokens of every sequence; the loop itself reads those."""
        behind = [lead for lead in inputs if lead.seq_cache.length < len(lead.ids) - LEAD_TOKENS]
        if behind:
            rows = [Row.chain(lead.seq_cache, lead.ids[lead.seq_cache.length : -LEAD_TOKENS]) for lead in behind]
            self.forward(rows, last_only=True)

    def _reserve_loop(self, inputs: list[DraftInput], steps: int) -> None:
        for lead in inputs:
            mine = own(lead.seq_cache)
            mine.length = min(mine.length, len(lead.ids) - LEAD_TOKENS)
            self.blocks.grow(mine, len(lead.ids) + steps)
            for clone in self.blocks.writable(mine, mine.length, len(lead.ids) + steps):
                self._copy_block(clone.source, clone.target)

    # --- for drafters that live on the target -------------------------------------------------------------------------

    def expose(self, *, hidden: bool = False, features: tuple[int, ...] = ()) -> None:
        self.want_hidden = self.want_hidden or hidden
        self.feature_layers = features or self.feature_layers

    def lm_head(self, hidden: Tensor) -> Tensor:
        return quantization.apply_matrix(self.weights.head, hidden, None)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.weights.embedding[tokens.to(self.device)]

    def early_exit(self, layer: int, adapter: Adapter | None = None) -> NativeRunner:
        if not 0 < layer < self.shape.layers:
            raise OptionError(f"an exit lies after layer 1 to {self.shape.layers - 1}, not {layer}")
        twin = copy.copy(self)
        twin.last_layer, twin.adapter = layer, adapter
        twin.want_hidden, twin.feature_layers = True, ()
        # Captured passes know the layers of the runner they were made for.
        twin.narrow = None if self.narrow is None else twin._narrow_passes()
        twin.prompts = None if self.prompts is None else twin._prompt_passes()
        return twin

    def rollback_draft(self, seq_cache: SequenceCache, length: int) -> None:
        """Back to `length`; but what this exit has computed past it waits for the pass that checks the draft tokens."""
        mine = own(seq_cache)
        if mine.ahead is None:
            self.truncate(seq_cache, length)
        mine.length = length
