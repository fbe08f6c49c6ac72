"""What the recurrent layers know of one sequence: its state, its tokens, and its row in a pass."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.types import Row
from paceline.layers.linear_attention import MAX_UNSETTLED

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

    def selected(self, nodes: list[int]) -> TokenPiece:
        """These nodes of a tree, the first of which may be the lead."""
        lead = tuple(self.lead[node] for node in nodes if node < len(self.lead))
        rest = [node - len(self.lead) for node in nodes if node >= len(self.lead)]
        return TokenPiece(self.start, lead, self.tokens[rest])


class ReadTokens:
    """The tokens of a sequence, as passes have read them. They are joined on the host only when they are needed."""

    def __init__(self, pieces: list[TokenPiece] | None = None) -> None:
        self._pieces = pieces or []

    def add(self, start: int, row: Row) -> None:
        """A row was read after `start` tokens."""
        self.extend(start, row.tokens, () if row.lead is None else (row.lead,))

    def extend(self, start: int, tokens: Tensor, lead: tuple[int, ...] = ()) -> None:
        """These tokens were read after `start` others. They are copied: the next pass may overwrite them."""
        self._pieces.append(TokenPiece(start, lead, tokens.clone()))
        if len(self._pieces) > MAX_PIECES:
            self.ids()

    def keep(self, start: int, nodes: list[int]) -> None:
        """Of the nodes of a tree that was read last, after `start` tokens, these stay."""
        if self._pieces and self._pieces[-1].start == start:
            self._pieces[-1] = self._pieces[-1].selected(nodes)

    def ids(self) -> list[int]:
        ids: list[int] = []
        for piece in self._pieces:
            del ids[piece.start :]
            ids += piece.ids()
        self._pieces = [TokenPiece(0, tuple(ids), torch.empty(0, dtype=torch.int64))]
        return ids

    def copy(self) -> ReadTokens:
        return ReadTokens(list(self._pieces))


@dataclass(slots=True, eq=False)
class SequenceState:
    """What the recurrent layers know of one sequence. settled: its first tokens that no commit can take back."""

    now: Snapshot = field(default_factory=Snapshot)
    settled: int = 0
    checkpoints: list[Snapshot] = field(default_factory=list)  # shortest first
    history: ReadTokens = field(default_factory=ReadTokens)

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
    def slot(self) -> int:
        assert self.state.now.slot is not None, "a pass begins with a slot for each sequence"
        return self.state.now.slot

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
