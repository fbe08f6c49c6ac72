"""A transformers model with its own cache, one sequence a pass: exactly the passes of transformers' own generation.

For models that the row buffers of runners/huggingface.py do not fit: recurrent and convolution states, caches with
more than keys and values, positions that are computed from the cache, rope factors that change with the length, and
models without any cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from paceline.core.types import ModelOutput, Row, RowOutput, SequenceCache
from paceline.device.memory import for_sampling
from paceline.errors import CapabilityError, OutOfMemory
from paceline.kv.block_manager import BlockManager
from paceline.runners.huggingface_model import TransformersRunner, explained_copy, explained_memory, token_inputs
from paceline.runners.huggingface_state import ModelState


class Reading(Enum):
    """What a pass may read after a state. The probe chooses (runners/huggingface_probe.py)."""

    CHAINS = "several tokens"
    TOKENS = "one token"
    EVERYTHING = "nothing: there is no state, every pass reads the whole sequence"


class StateSequenceCache(SequenceCache):
    """The tokens of a sequence, and what the model has computed of a prefix of them."""

    __slots__ = ("last_row_start", "state", "tokens")

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[int] = []
        self.state = ModelState()
        self.last_row_start = 0

    def cut(self, length: int) -> None:
        """Forget all past this length. The state follows when the next pass needs it."""
        self.length = min(self.length, length)
        del self.tokens[self.length :]


def own(seq_cache: SequenceCache) -> StateSequenceCache:
    assert isinstance(seq_cache, StateSequenceCache), "this sequence cache belongs to another runner"
    return seq_cache


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of a sequence whose outputs are wanted."""

    start: int
    end: int

    def split(self, at: int | None) -> list[Span]:
        if at is None or not self.start < at < self.end:
            return [self]
        return [Span(self.start, at), Span(at, self.end)]


class HuggingFaceStateRunner(TransformersRunner):
    """Reads every row by itself, after the state of its sequence.

    rope_switch  sequences longer than this are read with other rope factors, from their first token on: a pass never
                 holds tokens of both sides, and crossing it reads the sequence again, as transformers does
    """

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        reading: Reading = Reading.CHAINS,
        *,
        rope_switch: int | None = None,
        blocks: BlockManager | None = None,
    ) -> None:
        super().__init__(model, name, blocks)
        self.reading, self.rope_switch = reading, rope_switch

    # --- sequence caches ----------------------------------------------------------------------------------------------

    def new_cache(self) -> StateSequenceCache:
        return StateSequenceCache()

    def commit(self, seq_cache: SequenceCache, nodes: list[int]) -> None:
        assert nodes == list(range(len(nodes))), "a chain is kept from its beginning"
        cache = own(seq_cache)
        cache.cut(cache.last_row_start + len(nodes))

    def truncate(self, seq_cache: SequenceCache, length: int) -> None:
        own(seq_cache).cut(length)
        self.blocks.shrink(seq_cache, seq_cache.length)

    def free(self, seq_cache: SequenceCache) -> None:
        cache = own(seq_cache)
        self.blocks.release(cache)
        cache.cut(0)
        cache.state = ModelState()

    @torch.inference_mode()
    def fork(self, seq_cache: SequenceCache, length: int) -> StateSequenceCache:
        cache, twin = own(seq_cache), self.new_cache()
        try:
            self.blocks.grow(twin, length)
            with explained_copy(length):
                twin.state = cache.state.fork(length)
        except OutOfMemory:
            self.free(twin)
            raise
        twin.tokens, twin.length = cache.tokens[:length], length
        return twin

    # --- passes -------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(self, rows: list[Row], *, last_only: bool = False) -> ModelOutput:
        if not all(row.is_chain for row in rows):
            raise CapabilityError(f"{self.info.name} reads chains of draft tokens only, not trees")
        self.blocks.grow_rows(rows)
        new_tokens = [row.ids().tolist() for row in rows]
        with explained_memory(rows):
            outputs = [self._row(own(row.seq_cache), ids, last_only) for row, ids in zip(rows, new_tokens)]
        for row, ids in zip(rows, new_tokens):
            cache = own(row.seq_cache)
            cache.last_row_start = cache.length
            cache.tokens += ids
            cache.length += len(ids)
        return ModelOutput.of(outputs)

    def _row(self, cache: StateSequenceCache, ids: list[int], last_only: bool) -> RowOutput:
        tokens, row = cache.tokens + ids, Span(cache.length, cache.length + len(ids))
        cache.state.rewind(cache.length)
        parts = [self._span(cache.state, tokens, span, last_only) for span in row.split(self.rope_switch)]
        return joined(parts, last_only)

    def _span(self, state: ModelState, tokens: list[int], span: Span, last_only: bool) -> RowOutput:
        """Outputs of a span, which lies on one side of the switch."""
        if self.reading is Reading.EVERYTHING or self._crosses(state.length, span.end):
            state.rewind(0)
        if self.reading is not Reading.TOKENS or not state.length:
            return self._pass(state, tokens, span, last_only)
        singles = [Span(max(start, 0), start + 1) for start in range(state.length, span.end)]
        outputs = [self._pass(state, tokens, single, last_only) for single in singles]
        return joined(outputs[span.start - span.end :], last_only)

    def _crosses(self, before: int, after: int) -> bool:
        return self.rope_switch is not None and before <= self.rope_switch < after

    def _pass(self, state: ModelState, tokens: list[int], span: Span, last_only: bool) -> RowOutput:
        """Read all up to the end of a span after the state; the outputs are those of the span."""
        inputs = token_inputs(self.model, tokens[state.length : span.end], state.length)
        count = 1 if last_only else span.end - span.start
        extra: dict[str, Any] = {"logits_to_keep": count} if self._picks_logits else {}
        if self._wants_states:
            extra["output_hidden_states"] = True
        keep = self.reading is not Reading.EVERYTHING
        output = self.model(**inputs, use_cache=keep, **state.begin_pass(), **extra)
        state.end_pass(output, span.end)
        return self._output(output, count, span.end - span.start)

    def _output(self, output: Any, num_logits: int, num_states: int) -> RowOutput:
        hidden = features = None
        if self.want_hidden:
            hidden = output.hidden_states[-1][0, -num_states:]
        if self.feature_layers:
            layers = [self._entering(output.hidden_states, layer)[0, -num_states:] for layer in self.feature_layers]
            features = torch.cat(layers, dim=-1)
        return RowOutput(for_sampling(output.logits[0, -num_logits:]), hidden, features)


def joined(parts: list[RowOutput], last_only: bool) -> RowOutput:
    """The outputs of consecutive spans as one."""
    if len(parts) == 1:
        return parts[0]
    logits = parts[-1].logits if last_only else torch.cat([part.logits for part in parts])
    return RowOutput(logits, _joined([part.hidden for part in parts]), _joined([part.features for part in parts]))


def _joined(parts: list[Tensor | None]) -> Tensor | None:
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors) if tensors else None
