"""The states of recurrent layers: a slot for every sequence, checkpoints to go back to, and what a pass does with them.

Between passes a sequence has a state after some of its tokens, and in its ring the inputs of all tokens since. What
`commit` or `truncate` has settled is folded into the state by the next pass; what may still be rejected is not. Going
back further restores a checkpoint, and the tokens after it are read again: the runner asks `lacks` before each pass.

Slots are few. A sequence that needs one takes it from the state or the checkpoint that was used least recently; what
has lost its slot is computed again from its tokens when it is needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import torch
from torch import Tensor

from paceline.core.types import Row
from paceline.device.memory import zeroed_cache
from paceline.device.properties import supports_graphs
from paceline.errors import OutOfMemory
from paceline.layers.linear_attention import RING, DeltaNetSizes, DeltaNetStates, Recurrence
from paceline.runners.native.recurrent_batch import BatchIndices, kernel_spans
from paceline.runners.native.sequence_state import ReadTokens, SequenceState, Snapshot, StateSpan, spans_of

MIN_SLOTS, MAX_SLOTS = 32, 256
MAX_CHECKPOINTS = 4  # of a sequence


class StateSlots:
    """Which snapshot has which slot. Integers only."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))[::-1]
        self._holders: dict[int, Snapshot] = {}  # least recently used first

    def take(self, snapshot: Snapshot, keep: Collection[Snapshot] = ()) -> int:
        """A slot for the snapshot, if need be another's, but of none of `keep`. Raises OutOfMemory."""
        if not self._free:
            oldest = next((holder for holder in self._holders.values() if holder not in keep), None)
            if oldest is None:
                raise OutOfMemory("there are more sequences than states of recurrent layers: run fewer at a time")
            self.release(oldest)
        snapshot.slot = self._free.pop()
        self._holders[snapshot.slot] = snapshot
        return snapshot.slot

    def touch(self, snapshot: Snapshot) -> None:
        """The snapshot is used now."""
        if snapshot.slot is not None:
            self._holders[snapshot.slot] = self._holders.pop(snapshot.slot)

    def release(self, snapshot: Snapshot) -> None:
        """Give its slot back. Releasing twice is harmless."""
        if snapshot.slot is not None:
            del self._holders[snapshot.slot]
            self._free.append(snapshot.slot)
            snapshot.forget()


class NoStates:
    """Of a model without recurrent layers."""

    memory: DeltaNetStates | None = None

    @contextmanager
    def reading(self, rows: list[Row], states: list[SequenceState]) -> Iterator[list[StateSpan]]:
        """A pass over these rows, whose sequences have these states. Raises OutOfMemory before it begins."""
        yield []

    def recurrence(self, spans: list[StateSpan]) -> Recurrence | None:
        """What recurrent layers need to know about a pass."""
        return None

    def read_further(self, state: SequenceState, tokens: Tensor) -> None:
        """A pass over the row has gone on by itself, and read these tokens too."""

    def settle(self, state: SequenceState, length: int) -> None:
        """The first `length` tokens stay, all others are gone."""

    def free(self, state: SequenceState) -> None:
        """Forget the sequence. Freeing twice is harmless."""

    def fork(self, state: SequenceState, twin: SequenceState, length: int) -> None:
        """`twin`, which is new, begins with the first `length` tokens."""

    def lacks(self, state: SequenceState, length: int) -> bool:
        """Whether some of the first `length` tokens must be read again."""
        return False


class RecurrentStates(NoStates):
    """Of a model with gated delta nets. Raises OutOfMemory where the slots do not fit the device."""

    def __init__(self, sizes: DeltaNetSizes, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self._slots = StateSlots(num_slots)
        wide = torch.promote_types(dtype, torch.float32)
        states = zeroed_cache((sizes.num_layers, num_slots, *sizes.state_shape), wide, device)
        inputs = zeroed_cache((sizes.num_layers, num_slots, RING, sizes.input_size), dtype, device)
        self.memory: DeltaNetStates = DeltaNetStates(sizes, states, inputs)
        on_gpu = supports_graphs(device) and find_spec("triton") is not None
        self._runs_kernels = on_gpu and sizes.fits_kernels and dtype != torch.float64

    # --- sequence caches ----------------------------------------------------------------------------------------------

    def settle(self, state: SequenceState, length: int) -> None:
        state.settled = length
        for checkpoint in [checkpoint for checkpoint in state.checkpoints if checkpoint.length > length]:
            self._drop(state, checkpoint)
        for snapshot in (state.now, *state.checkpoints):
            snapshot.cut(length)
        if state.now.length > length:
            self._rewind(state, length)

    def _rewind(self, state: SequenceState, length: int) -> None:
        source = state.latest(length)
        if source is None:
            self._slots.release(state.now)
        else:
            self._copy(source, state.now)

    def free(self, state: SequenceState) -> None:
        self._slots.release(state.now)
        for checkpoint in list(state.checkpoints):
            self._drop(state, checkpoint)
        state.settled, state.history = 0, ReadTokens()

    def fork(self, state: SequenceState, twin: SequenceState, length: int) -> None:
        twin.settled, twin.history = length, state.history.copy()
        source = state.latest(length)
        if source is not None:
            self._slots.touch(source)
            self._slots.take(twin.now, keep=[source])
            self._copy(source, twin.now)
            twin.now.cut(length)

    def lacks(self, state: SequenceState, length: int) -> bool:
        return state.now.end < length

    # --- passes -------------------------------------------------------------------------------------------------------

    @contextmanager
    def reading(self, rows: list[Row], states: list[SequenceState]) -> Iterator[list[StateSpan]]:
        spans, done = spans_of(rows, states), False
        self._begin(spans)
        try:
            yield spans
            done = True
        finally:
            for span, row in zip(spans, rows):
                if done:
                    self._end(span, row)
                else:
                    self._fail(span.state)

    def recurrence(self, spans: list[StateSpan]) -> Recurrence:
        if not self._runs_kernels:
            return BatchIndices(self.memory, spans).batch()
        from paceline.layers.linear_attention_triton import KernelRecurrence

        return KernelRecurrence(kernel_spans(self.memory, spans))

    def read_further(self, state: SequenceState, tokens: Tensor) -> None:
        state.history.extend(state.now.end, tokens)
        state.now.end += tokens.shape[0]

    def _begin(self, spans: list[StateSpan]) -> None:
        used = [span.state.now for span in spans]
        for now in used:
            self._slots.touch(now)
        for now in used:
            if now.slot is None:
                self._clear(self._slots.take(now, keep=used))
        for span in spans:
            if span.is_long:
                self._keep_checkpoint(span.state, used)

    def _end(self, span: StateSpan, row: Row) -> None:
        now = span.state.now
        now.length, now.end = span.folded, span.end
        span.state.history.add(span.length, row)
        if span.is_long:
            self._keep_checkpoint(span.state, [now])

    def _fail(self, state: SequenceState) -> None:
        """What a pass that has raised did to the state is not known."""
        self._slots.release(state.now)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def _keep_checkpoint(self, state: SequenceState, used: list[Snapshot]) -> None:
        """Where the state is now, other sequences may part from this one, or it may have to go back."""
        now, lengths = state.now, {checkpoint.length for checkpoint in state.checkpoints}
        if now.length in lengths or not now.length:
            return
        checkpoint = Snapshot()
        try:
            self._slots.take(checkpoint, keep=used)
        except OutOfMemory:  # every slot is used in this pass
            return
        self._copy(now, checkpoint)
        state.checkpoints.append(checkpoint)
        kept = thinned(state.checkpoints)
        for dropped in [checkpoint for checkpoint in state.checkpoints if checkpoint not in kept]:
            self._drop(state, dropped)

    def _drop(self, state: SequenceState, checkpoint: Snapshot) -> None:
        state.checkpoints.remove(checkpoint)
        self._slots.release(checkpoint)

    def _copy(self, source: Snapshot, target: Snapshot) -> None:
        for tensor in (self.memory.states, self.memory.inputs):
            tensor[:, target.slot] = tensor[:, source.slot]
        target.length, target.end = source.length, source.end

    def _clear(self, slot: int) -> None:
        self.memory.states[:, slot] = 0


def thinned(checkpoints: list[Snapshot]) -> list[Snapshot]:
    """Those that still have a slot: the newest, and before it as few as leave gaps that double."""
    backwards = [checkpoint for checkpoint in checkpoints[::-1] if checkpoint.slot is not None]
    kept = backwards[:1]
    for checkpoint in backwards[1:]:
        newest = kept[0].length
        if newest - checkpoint.length >= 2 * (newest - kept[-1].length):
            kept.append(checkpoint)
    return kept[:MAX_CHECKPOINTS][::-1]


def num_slots(sizes: DeltaNetSizes, dtype: torch.dtype, cache_bytes: int) -> int:
    """As many as take the memory of the KV cache, within bounds."""
    wide = torch.promote_types(dtype, torch.float32).itemsize
    heads, value_dim, key_dim = sizes.state_shape
    layer_bytes = heads * value_dim * key_dim * wide + RING * sizes.input_size * dtype.itemsize
    return min(max(MIN_SLOTS, cache_bytes // max(1, sizes.num_layers * layer_bytes)), MAX_SLOTS)
