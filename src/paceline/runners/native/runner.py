"""The native runner: paged cache, packed rows, plain passes everywhere, captured passes on CUDA."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from paceline.core.graphs import new_pool
from paceline.core.protocols import Ability, Adapter, Guesses, Lead, ModelCard, Outputs, Row, Slot
from paceline.errors import OptionError, OutOfMemory
from paceline.kv.pages import PagePool
from paceline.runners.native import quantized
from paceline.runners.native.layout import Layout, place_of
from paceline.runners.native.loading import (
    can_fuse,
    card_of,
    config_of,
    default_cache_tokens,
    end_tokens_in,
    pack_weights,
)
from paceline.runners.native.model import States, run_layers
from paceline.runners.native.plain import PlainOps
from paceline.runners.native.resume import Ahead, common_layer, merged
from paceline.runners.native.shape import Shape, rotary_table, shape_of
from paceline.runners.native.slots import PAGE, NativeSlot, empty_pages, own
from paceline.runners.native.weights import Weights, load_weights, weights_of

if TYPE_CHECKING:
    from paceline.runners.native.narrow import Check, NarrowPasses, Size
    from paceline.runners.native.prompts import PromptPasses

SLACK = 512  # a drafting loop may run a few steps past the end of the longest text
WIDEST_NARROW = 512  # nodes in a captured pass, over all texts
LEAD_TOKENS = 2  # what a drafting loop reads of a text; narrow.LEAD, known here without importing Triton


class NativeRunner:
    """A Llama-like model behind `Runner`. See `load` and `of_model` for how to get one.

    same_bits: on CUDA, a token's logits do not depend on what else is in the pass, in the largest batch neither.
    """

    def __init__(
        self,
        shape: Shape,
        weights: Weights,
        config: Any,
        card: ModelCard,
        cache_tokens: int,
        *,
        same_bits: bool = False,
    ) -> None:
        self.same_bits = same_bits
        self.shape, self.weights, self.card = shape, weights, card
        self.abilities = frozenset({Ability.TREE, Ability.HIDDEN, Ability.EXIT})
        self.device = torch.device(card.device)
        pages = max(1, -(-cache_tokens // PAGE))
        kept = weights.embedding.dtype
        self.scratch = pages * PAGE  # behind the last page, on a page of its own: what pads a prompt
        size = (shape.layers, self.scratch + PAGE, shape.kv_heads, shape.head_size)
        try:
            self.keys, self.values = (empty_pages(size, kept, self.device) for _ in range(2))
        except (torch.OutOfMemoryError, OSError, RuntimeError) as error:
            raise OutOfMemory(f"a cache of {cache_tokens} tokens does not fit: lower --cache-tokens") from error
        self.pages = PagePool(pages, PAGE)  # last: of a cache that does not fit not even the list may
        self.turns = rotary_table(config, shape.longest_text + SLACK, self.device)
        by_node = quantized.rounds_inputs(weights.head)
        self.plain = PlainOps(shape, self.keys, self.values, node_by_node=by_node)
        self._layout = Layout(self.pages, self.plain, self.turns, kept)
        self.narrow = self._narrow_passes() if self.device.type == "cuda" else None
        self.prompts = self._prompt_passes() if self.device.type == "cuda" else None
        if self.narrow is not None:
            self.abilities |= {Ability.LOOP, Ability.STRIDE}
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
        cache_tokens: int | None = None,
        *,
        same_bits: bool = False,
    ) -> NativeRunner:
        """Read a Hugging Face directory. dtype: float32, bfloat16, float16, int8 or int4."""
        config = config_of(folder, name)
        shape = shape_of(config)
        beside = torch.float32 if device == "cpu" else torch.bfloat16  # what is not a matrix
        kind = beside if dtype in quantized.WORDS else getattr(torch, dtype)
        weights = load_weights(folder, shape, kind, device)
        if dtype in quantized.WORDS:
            weights = pack_weights(weights, dtype)
        card = card_of(name, shape, end_tokens_in(folder, config), device, dtype)
        return cls(shape, weights, config, card, cache_tokens or default_cache_tokens(shape), same_bits=same_bits)

    @classmethod
    def of_model(
        cls, model: Any, name: str, cache_tokens: int | None = None, *, same_bits: bool = False
    ) -> NativeRunner:
        """Run a loaded transformers model of the family."""
        from paceline.runners.loading import end_tokens_of

        shape = shape_of(model.config)
        first = next(model.parameters())
        word = str(first.dtype).removeprefix("torch.")
        card = card_of(name, shape, end_tokens_of(model), str(first.device), word)
        with torch.no_grad():
            weights = weights_of(model, shape)
        room = cache_tokens or default_cache_tokens(shape)
        return cls(shape, weights, model.config, card, room, same_bits=same_bits)

    # --- slots --------------------------------------------------------------------------------------------------------

    def open(self) -> NativeSlot:
        return NativeSlot()

    @torch.inference_mode()
    def keep(self, slot: Slot, nodes: list[int]) -> None:
        mine = own(slot)
        moved = [(node, place) for place, node in enumerate(nodes) if node != place]
        if moved:
            table = self.pages.table(mine.number)
            source = torch.tensor([place_of(table, mine.fresh + node) for node, _ in moved], device=self.device)
            target = torch.tensor([place_of(table, mine.fresh + place) for _, place in moved], device=self.device)
            for cache in (self.keys, self.values):
                cache[:, target] = cache[:, source]
        mine.length = mine.fresh + len(nodes)

    def trim(self, slot: Slot, length: int) -> None:
        mine = own(slot)
        mine.length, mine.ahead = min(mine.length, length), None
        self.pages.shrink(mine.number, mine.length)

    def close(self, slot: Slot) -> None:
        mine = own(slot)
        self.pages.release(mine.number)
        mine.length, mine.ahead = 0, None

    def fork(self, slot: Slot, length: int) -> NativeSlot:
        twin = NativeSlot()
        self.pages.share(own(slot).number, twin.number, length)
        twin.length = length
        return twin

    def room(self) -> int:
        return self.pages.free * PAGE

    # --- passes -------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, rows: list[Row], *, last_only: bool = False) -> Outputs:
        self._reserve(rows)
        try:
            said = self._pass(rows, last_only)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory("a pass does not fit: run fewer texts at a time, or shorter ones") from error
        for row in rows:
            mine = own(row.slot)
            mine.fresh = mine.length
            mine.length += len(row.parents)
        return said

    def _pass(self, rows: list[Row], last_only: bool) -> Outputs:
        """The rows by the way that suits them: captured and narrow, captured first reads, or plain."""
        size = self._narrow_size(rows, last_only)
        if size is not None:
            return self._narrow_pass(rows, size, last_only)
        if last_only and self.prompts is not None and all(map(self._is_first_read, rows)):
            return self._first_reads(rows, self.prompts)
        if self.same_bits and len(rows) > 1:  # the library's products round by how many rows there are
            return Outputs.of([self._pass([row], last_only)[0].copied() for row in rows])
        return self._plain_pass(rows, last_only)

    def _is_first_read(self, row: Row) -> bool:
        assert self.prompts is not None
        return row.slot.length == 0 and row.is_chain and self.prompts.fits(len(row.parents))

    def _first_reads(self, rows: list[Row], passes: PromptPasses) -> Outputs:
        read = []
        for row in rows:
            places = self._layout.places(own(row.slot), 0, len(row.parents))
            flat = torch.arange(places.start, places.stop) if isinstance(places, slice) else places
            read.append(passes.read(row.ids(), flat))
        return read[0] if len(read) == 1 else Outputs.of([one for said in read for one in said])

    def _reserve(self, rows: list[Row], steps: int = 1) -> None:
        """Pages for every row and the tokens written after it, or OutOfMemory and nothing changed."""
        done: list[NativeSlot] = []
        try:
            for row in rows:
                mine = own(row.slot)
                done.append(mine)
                end = mine.length + len(row.parents) + steps - 1
                self.pages.grow(mine.number, end)
                for copied in self.pages.writable(mine.number, mine.length, end):
                    self._copy_page(copied.source, copied.target)
        except OutOfMemory:
            for mine in done:
                self.pages.shrink(mine.number, mine.length)
            raise

    def _copy_page(self, source: int, target: int) -> None:
        for cache in (self.keys, self.values):
            cache[:, target * PAGE : (target + 1) * PAGE] = cache[:, source * PAGE : (source + 1) * PAGE]

    def _plain_pass(self, rows: list[Row], last_only: bool) -> Outputs:
        widths = [len(row.parents) for row in rows]
        layer = None if self.feature_layers else common_layer([own(row.slot).ahead for row in rows])
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
            mine, here = own(row.slot), slice(start, start + len(row.parents))
            start = here.stop
            if not leaves or not row.is_chain:
                mine.ahead = None
                continue
            if mine.ahead is None or mine.ahead.end != mine.length:
                mine.ahead = Ahead(self.last_layer, mine.length)
            mine.ahead.add(tokens[here], stream[here])

    def _resumed(self, rows: list[Row], widths: list[int], layer: int) -> States:
        """Lower layers over what the exit has not read, then the upper ones over every node."""
        left = [own(row.slot).ahead for row in rows]
        known = [None if ahead is None else ahead.reaches(row) for ahead, row in zip(left, rows)]
        skips = [0 if states is None else states.shape[0] for states in known]
        for row in rows:
            own(row.slot).ahead = None
        tokens = torch.cat([row.ids()[skip:] for row, skip in zip(rows, skips)])
        below = self._layout.batch(rows, skips)
        fresh = run_layers(self.weights, self.weights.embedding[tokens], below, self.plain, last=layer).stream
        stream = merged(known, fresh, widths)
        return run_layers(self.weights, stream, self._layout.batch(rows), self.plain, first=layer)

    def _said(self, states: States, widths: list[int], last_only: bool) -> Outputs:
        """Norm and head on what is asked for: with last_only on one node a row."""
        stream = states.stream
        if not last_only:
            hidden = self.plain.norm(stream, self.weights.final_norm)
            shown = hidden if self.want_hidden else None
            return Outputs(self.speak(hidden), widths, shown, states.features)
        ends = torch.tensor(list(itertools.accumulate(widths)), device=stream.device) - 1
        hidden = self.plain.norm(stream if self.want_hidden else stream[ends], self.weights.final_norm)
        last = hidden[ends] if self.want_hidden else hidden
        shown = hidden if self.want_hidden else None
        return Outputs(self.speak(last), [1] * len(widths), shown, states.features, widths)

    def speak(self, hidden: Tensor) -> Tensor:
        """States behind the final norm -> logits; of an exit, through its adapter."""
        return self.head(hidden if self.adapter is None else self.adapter(hidden))

    # --- narrow passes, on CUDA ---------------------------------------------------------------------------------------

    def _narrow_passes(self) -> NarrowPasses | None:
        """Fused, captured passes; None where this machine or this model cannot have them."""
        if not can_fuse(self.shape, self.weights):
            return None
        from paceline.runners.native.fused import FusedOps
        from paceline.runners.native.narrow import NarrowPasses

        longest = min(self.shape.longest_text, self.pages.pages * PAGE) + SLACK
        checks = FusedOps(self.shape, self.keys, self.values, self.turns, PAGE, same_bits=self.same_bits)
        loops = FusedOps(self.shape, self.keys, self.values, self.turns, PAGE, vectors=True)
        return NarrowPasses(self, checks, loops, -(-longest // PAGE), new_pool())

    def _prompt_passes(self) -> PromptPasses:
        from paceline.runners.native.prompts import PromptPasses

        return PromptPasses(self, new_pool())

    def _narrow_size(self, rows: list[Row], last_only: bool) -> Size | None:
        """The captured size these rows fit into; None: a plain pass is the better or the only way."""
        nodes = max(len(row.parents) for row in rows)
        if self.narrow is None or (last_only and nodes > 2) or len(rows) * nodes > WIDEST_NARROW:
            return None
        return self.narrow.fits(len(rows), nodes, max(own(row.slot).length for row in rows) + nodes)

    def _narrow_pass(self, rows: list[Row], size: Size, last_only: bool) -> Outputs:
        said = self._staged(rows, size).said([len(row.parents) for row in rows], last_only)
        return said if self.adapter is None else self._adapted(said)

    def _staged(self, rows: list[Row], size: Size) -> Check:
        """The captured pass of this size with these rows laid before it."""
        assert self.narrow is not None
        check = self.narrow.check(size)
        for index, row in enumerate(rows):
            check.staging.put_row(index, row, own(row.slot).length, self.pages.table(own(row.slot).number))
        check.staging.send(len(rows))
        for index, row in enumerate(rows):
            if row.tokens.is_cuda and row.tokens.shape[0]:
                first = len(row.parents) - row.tokens.shape[0]
                check.staging.token_ids[index, first : len(row.parents)].copy_(row.tokens)
        return check

    def _adapted(self, said: Outputs) -> Outputs:
        """A captured exit has spoken as it is; let its states speak through the adapter instead."""
        assert said.hidden is not None, "an exit hands out its states"
        states = said.hidden
        if said.read is not None:
            states = states[torch.tensor(list(itertools.accumulate(said.read)), device=states.device) - 1]
        return replace(said, logits=self.speak(states), best=None)

    @torch.inference_mode()
    def loop(self, leads: list[Lead], steps: int) -> Guesses | None:
        sampled = leads[0].temperature > 0
        if any((lead.temperature > 0) != sampled or len(lead.ids) < LEAD_TOKENS for lead in leads):
            return None
        longest = max(len(lead.ids) for lead in leads) + steps
        size = None if self.narrow is None else self.narrow.fits(len(leads), LEAD_TOKENS, longest)
        if size is None or self.narrow is None:
            return None
        self._catch_up(leads)
        loop = self.narrow.loop(size, steps, sampled)
        self._reserve_loop(leads, loop.chances.shape[1])
        for index, lead in enumerate(leads):
            loop.staging.put_lead(index, lead.ids, self.pages.table(own(lead.slot).number))
        loop.staging.send(len(leads))
        if sampled:
            loop.put_chances([lead.temperature for lead in leads], [lead.chances or [] for lead in leads])
        drafted = loop.run()
        for lead in leads:
            lead.slot.length = len(lead.ids) + steps - 1
        probs = None if drafted.probs is None else drafted.probs[: len(leads), :steps]
        return Guesses(drafted.tokens[: len(leads), :steps], probs)

    @torch.inference_mode()
    def stride(self, rows: list[Row], steps: int) -> Tensor | None:
        longest = max(own(row.slot).length for row in rows) + steps
        size = None if self.narrow is None else self.narrow.fits(len(rows), 1, longest)
        if size is None or self.narrow is None or longest > self.shape.longest_text:
            return None
        try:
            self._reserve(rows, steps)
        except OutOfMemory:
            return None
        check = self._staged(rows, size)
        written = self.narrow.repeat(check, steps)[: len(rows)]
        for row in rows:
            mine = own(row.slot)
            mine.fresh, mine.length = mine.length, mine.length + steps
        return written

    def _catch_up(self, leads: list[Lead]) -> None:
        """Read all but the last two tokens of every text; the loop itself reads those."""
        behind = [lead for lead in leads if lead.slot.length < len(lead.ids) - LEAD_TOKENS]
        if behind:
            rows = [Row.chain(lead.slot, lead.ids[lead.slot.length : -LEAD_TOKENS]) for lead in behind]
            self.forward(rows, last_only=True)

    def _reserve_loop(self, leads: list[Lead], steps: int) -> None:
        for lead in leads:
            mine = own(lead.slot)
            mine.length = min(mine.length, len(lead.ids) - LEAD_TOKENS)
            self.pages.grow(mine.number, len(lead.ids) + steps)
            for copied in self.pages.writable(mine.number, mine.length, len(lead.ids) + steps):
                self._copy_page(copied.source, copied.target)

    # --- for drafters that live on the target -------------------------------------------------------------------------

    def expose(self, *, hidden: bool = False, features: tuple[int, ...] = ()) -> None:
        self.want_hidden = self.want_hidden or hidden
        self.feature_layers = features or self.feature_layers

    def head(self, hidden: Tensor) -> Tensor:
        return quantized.apply_matrix(self.weights.head, hidden, None)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.weights.embedding[tokens.to(self.device)]

    def exit_at(self, layer: int, adapter: Adapter | None = None) -> NativeRunner:
        if not 0 < layer < self.shape.layers:
            raise OptionError(f"an exit lies after layer 1 to {self.shape.layers - 1}, not {layer}")
        twin = copy.copy(self)
        twin.last_layer, twin.adapter = layer, adapter
        twin.want_hidden, twin.feature_layers = True, ()
        # Captured passes know the layers of the runner they were made for.
        twin.narrow = None if self.narrow is None else twin._narrow_passes()
        twin.prompts = None if self.prompts is None else twin._prompt_passes()
        return twin

    def hand_over(self, slot: Slot, length: int) -> None:
        """Back to `length`; but what this exit has computed past it waits for the pass that checks the guesses."""
        mine = own(slot)
        if mine.ahead is None:
            self.trim(slot, length)
        mine.length = length
