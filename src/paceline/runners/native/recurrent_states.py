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
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.types import Row
from paceline.device.memory import zeroed_cache
from paceline.errors import OutOfMemory
from paceline.layers.linear_attention import (
    MAX_UNSETTLED,
    RING,
    DeltaNetSizes,
    DeltaNetStates,
    Fold,
    RecurrentBatch,
)

MIN_SLOTS, MAX_SLOTS = 32, 256
MAX_CHECKPOINTS = 4  # of a sequence
MAX_PIECES = 256  # of a history before they are joined


@dataclass(slots=True, eq=False)
class Snapshot:
    """A state in a slot, after `length` tokens; its ring has the inputs of those up to `end`. No slot: no tokens."""

    length: int = 0
    end: int = 0
    slot: int | None = None

    def forget(self) -> None:
        self.length, self.end, self.slot = 0, 0, None

    def cut(self, length: int) -> None:
        """Tokens from `length` on are gone."""
        self.end = min(self.end, length)


@dataclass(frozen=True, slots=True, eq=False)
class TokenPiece:
    """Tokens that a pass has read: all that the sequence had from `start` on are replaced by them."""

    start: int
    lead: tuple[int, ...]
    tokens: Tensor

    def ids(self) -> list[int]:
        return [*self.lead, *self.tokens.tolist()]


class TokenHistory:
    """The tokens of a sequence, as passes have read them. They are joined on the host only when they are needed."""

    def __init__(self, pieces: list[TokenPiece] | None = None) -> None:
        self._pieces = pieces or []

    def add(self, start: int, row: Row) -> None:
        """A row was read after `start` tokens. Tokens on a device are copied: the next pass may overwrite them."""
        self._pieces.append(TokenPiece(start, () if row.lead is None else (row.lead,), row.tokens.clone()))
        if len(self._pieces) > MAX_PIECES:
            self.ids()

    def ids(self) -> list[int]:
        ids: list[int] = []
        for piece in self._pieces:
            del ids[piece.start :]
            ids += piece.ids()
        self._pieces = [TokenPiece(0, tuple(ids), torch.empty(0, dtype=torch.int64))]
        return ids

    def copy(self) -> TokenHistory:
        return TokenHistory(list(self._pieces))


@dataclass(slots=True, eq=False)
class SequenceState:
    """What the recurrent layers know of one sequence. settled: its first tokens that no commit can take back."""

    now: Snapshot = field(default_factory=Snapshot)
    settled: int = 0
    checkpoints: list[Snapshot] = field(default_factory=list)  # shortest first
    history: TokenHistory = field(default_factory=TokenHistory)

    def latest(self, length: int) -> Snapshot | None:
        """The latest state of at most `length` tokens that has a slot."""
        states = [state for state in (*self.checkpoints, self.now) if state.slot is not None and state.length <= length]
        return max(states, key=lambda state: state.length, default=None)


@dataclass(frozen=True, slots=True, eq=False)
class StateSpan:
    """The row of one sequence in a pass: `count` nodes from `start` on, after `length` tokens."""

    state: SequenceState
    length: int
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.length + self.count

    @property
    def folded(self) -> int:
        """Tokens of the state after the pass: the settled ones, and more where too many would wait."""
        settled = min(self.state.settled, self.length)
        return max(self.state.now.length, settled, self.end - MAX_UNSETTLED)

    @property
    def is_long(self) -> bool:
        """Whether the row is folded before it can be committed."""
        return self.count > MAX_UNSETTLED


def spans_of(rows: list[Row], states: list[SequenceState]) -> list[StateSpan]:
    """Rows of a pass, packed one after another."""
    spans: list[StateSpan] = []
    start = 0
    for row, state in zip(rows, states):
        spans.append(StateSpan(state, row.seq_cache.length, start, len(row.parents)))
        start += spans[-1].count
    return spans


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

    @contextmanager
    def reading(self, rows: list[Row], states: list[SequenceState]) -> Iterator[RecurrentBatch | None]:
        """A pass over these rows, whose sequences have these states. Raises OutOfMemory before it begins."""
        yield None

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
        self._slots, self._sizes = StateSlots(num_slots), sizes
        wide = torch.promote_types(dtype, torch.float32)
        states = zeroed_cache((sizes.num_layers, num_slots, *sizes.state_shape), wide, device)
        inputs = zeroed_cache((sizes.num_layers, num_slots, RING, sizes.input_size), dtype, device)
        self.memory = DeltaNetStates(sizes, states, inputs)

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
        state.settled, state.history = 0, TokenHistory()

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
    def reading(self, rows: list[Row], states: list[SequenceState]) -> Iterator[RecurrentBatch | None]:
        spans, done = spans_of(rows, states), False
        batch = self._begin(spans)
        try:
            yield batch
            done = True
        finally:
            for span, row in zip(spans, rows):
                self._end(span, row) if done else self._fail(span.state)

    def _begin(self, spans: list[StateSpan]) -> RecurrentBatch:
        used = [span.state.now for span in spans]
        for now in used:
            self._slots.touch(now)
        for now in used:
            if now.slot is None:
                self._clear(self._slots.take(now, keep=used))
        for span in spans:
            if span.is_long:
                self._keep_checkpoint(span.state, used)
        return BatchIndices(self.memory, spans).batch()

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
    return min(max(MIN_SLOTS, cache_bytes // (sizes.num_layers * layer_bytes)), MAX_SLOTS)


class BatchIndices:
    """Builds the index tensors of one pass from the rows of its sequences."""

    def __init__(self, memory: DeltaNetStates, spans: list[StateSpan]) -> None:
        self._memory, self._spans, self._context = memory, spans, memory.sizes.taps - 1
        self._steps = max(span.end - span.state.now.length for span in spans)
        self._kept: list[int] = []

    def batch(self) -> RecurrentBatch:
        places = [self._places(span) for span in self._spans]
        first_new = 1 + sum(map(len, places))
        columns = [self._column(span, kept, first_new) for span, kept in zip(self._spans, places)]
        stored = [place for span in self._spans for place in self._stored_places(span)]
        return RecurrentBatch(
            self._memory,
            self._tensor([_slot(span) for span in self._spans]),
            self._tensor(self._kept),
            self._tensor(columns).T.contiguous(),
            self._tensor([node for seq, span in enumerate(self._spans) for node in self._nodes(seq, span)]),
            self._tensor([node for span in self._spans for node in _stored_nodes(span)]),
            self._tensor(stored),
            self._folds(),
        )

    def _tensor(self, numbers: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._memory.states.device)

    def _places(self, span: StateSpan) -> range:
        """Positions whose inputs the ring has: those after the state, and before it those the convolution reads."""
        return range(max(0, span.state.now.length - self._context), span.length)

    def _column(self, span: StateSpan, kept: range, first_new: int) -> list[int]:
        """What a sequence reads at each step: 0 where there is no token."""
        before = [0] * (self._context - (span.state.now.length - kept.start))
        first_kept = 1 + len(self._kept)
        self._kept += [_place(span, position) for position in kept]
        new = range(first_new + span.start, first_new + span.start + span.count)
        column = [*before, *range(first_kept, first_kept + len(kept)), *new]
        return column + [0] * (self._context + self._steps - len(column))

    def _nodes(self, seq: int, span: StateSpan) -> list[int]:
        first, num_seqs = span.length - span.state.now.length, len(self._spans)
        return [(first + node) * num_seqs + seq for node in range(span.count)]

    def _stored_places(self, span: StateSpan) -> list[int]:
        return [_place(span, span.length + node - span.start) for node in _stored_nodes(span)]

    def _folds(self) -> list[Fold]:
        by_steps: dict[int, list[int]] = {}
        for seq, span in enumerate(self._spans):
            by_steps.setdefault(span.folded - span.state.now.length, []).append(seq)
        return [
            Fold(steps, self._tensor(seqs), self._tensor([_slot(self._spans[seq]) for seq in seqs]))
            for steps, seqs in by_steps.items()
            if steps
        ]


def _slot(span: StateSpan) -> int:
    assert span.state.now.slot is not None, "a pass begins with a slot for each sequence"
    return span.state.now.slot


def _place(span: StateSpan, position: int) -> int:
    return _slot(span) * RING + position % RING


def _stored_nodes(span: StateSpan) -> range:
    """The last nodes of a row, as many as the ring holds."""
    return range(span.start + max(0, span.count - RING), span.start + span.count)
