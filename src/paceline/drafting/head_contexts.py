"""What a drafter with a head holds of every sequence: the keys and values of the target's states, and states not read
yet. Chains (EAGLE, MTP) and blocks (DFlash) differ in how they read them."""

from __future__ import annotations

from torch import Tensor

from paceline.core.sequence import Sequence
from paceline.core.types import StepResult
from paceline.device.properties import on_host
from paceline.drafting.eagle_state import HeadPrefixes, HeadState
from paceline.heads.kv_cache import KeyBuffers
from paceline.kv.prefix_cache import PrefixCache

FIRST_ROW = [0]  # of a step that has emitted one token


class HeadContexts:
    """The contexts of all sequences."""

    def __init__(self, buffers: KeyBuffers, prefix_cache: PrefixCache | None, owner: str, ahead: int) -> None:
        """prefix_cache: None for a private one. owner: of the entries there. ahead: tokens an entry reads ahead."""
        self.buffers, self._on_host = buffers, on_host(buffers.device)
        self._states: dict[int, HeadState] = {}
        self._prefixes = HeadPrefixes(buffers, prefix_cache, owner, ahead)

    def __len__(self) -> int:
        return len(self._states)

    def of(self, seq: Sequence) -> HeadState:
        return self._states[seq.seq_id]

    def has(self, seq: Sequence) -> bool:
        """Whether there is anything to draft from."""
        state = self._states.get(seq.seq_id)
        return state is not None and bool(state.pending or state.length)

    def begin(self, seq: Sequence, states: Tensor | None) -> None:
        """A sequence starts. states [positions, features]: of the tokens the target has just read."""
        num_read = 0 if states is None else states.shape[0]
        self.end(seq)
        state = HeadState(seq, self.buffers.take(), len(seq.ids) - 1 - num_read)
        if state.start:
            self._prefixes.reuse(state, [other for other in self._states.values() if other.length])
        if states is not None:
            state.add(states, num_read)
        self._states[seq.seq_id] = state

    def extend(self, seq: Sequence, result: StepResult, states: Tensor, *, alone: bool = False) -> None:
        """Add the states of what a step has added to the sequence. states: a row for the sequence and one a node.
        alone: they are all that the pass has returned."""
        state = self._states.get(seq.seq_id)
        if state is None:
            return
        rows = result.kept_rows if len(result.emitted) > 1 else FIRST_ROW
        first = len(seq.ids) - 1 - len(rows)
        if first != state.next_position + state.num_pending:  # steps were not observed: restart here
            state.restart_at(first)
        # On the host every pass has memory of its own: where all of it is kept there is nothing to copy, and no call of
        # torch, which a drafter that drafts now and then would wait for in every step.
        is_whole = alone and self._on_host and len(rows) == states.shape[0]
        state.add(states if is_whole else _copied(states, rows), len(rows))

    def end(self, seq: Sequence) -> None:
        """The sequence is over; its entries are kept where its cache is. Ending one that never began is harmless."""
        state = self._states.pop(seq.seq_id, None)
        if state is None:
            return
        if state.length and seq.keep_cache:
            self._prefixes.keep(state)
        self.buffers.give(state.row)


def _copied(states: Tensor, rows: list[int]) -> Tensor:
    """These rows of the states of a step: the next pass may write where they are."""
    return states[: len(rows)].clone() if rows[-1] < len(rows) else states[rows]
