"""Suffix decoding: the longest repeated suffix of a sequence predicts what comes next.

Every sequence has a suffix automaton over its prompt and its output. It counts, so a draft is the likeliest tree of
earlier continuations, and its size follows from the counts: a steady repetition becomes a long chain, a context that
continued in several ways becomes a few branches, and where nothing is likely there are no draft tokens. A token costs
O(1), amortised.

`remember` gives all sequences a shared memory of that many megabytes over earlier outputs. It is off by default: draft
tokens never change an output, but its speed then depends on the outputs of others.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.draft_tree import DraftTree
from paceline.core.draft_value import DraftValue
from paceline.core.protocols import Drafter
from paceline.core.sequence import Sequence
from paceline.core.types import Capability, RowOutput
from paceline.drafting.registry import DrafterContext, DrafterSpec, WeightsNeeded, options_of
from paceline.drafting.suffix_automaton import NOTHING, Context, Forecast, ForecastBounds, SuffixAutomaton
from paceline.errors import OptionError

MEGABYTE = 1 << 20
WORTH_TRYING = 0.5  # of the probability that a draft token needs to be sent: counts may understate it
BOUNDS_EVERY = 8  # drafts after which it is asked again how likely a draft token must be
LOOKBACK = 64  # tokens of a sequence that locate it in an automaton it has not used before


class OutputStore:
    """Earlier outputs in at most `max_bytes`: two automata, of which the older is dropped when the younger is full.

    So the latest half of the memory is always there, and eviction costs nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.automata: list[SuffixAutomaton] = [SuffixAutomaton()]

    @property
    def memory(self) -> int:
        return sum(automaton.memory for automaton in self.automata)

    def add(self, tokens: list[int]) -> None:
        """Store the output of a finished sequence."""
        self.automata[-1].start_sequence()
        for token in tokens:
            if 2 * self.automata[-1].memory >= self._max_bytes:
                self.automata = [self.automata[-1], SuffixAutomaton()]
            self.automata[-1].append(token)


@dataclass(slots=True)
class _StorePosition:
    """The context of a sequence in one automaton of the store, after `num_read` of its tokens."""

    automaton: SuffixAutomaton
    context: Context
    num_read: int


@dataclass(frozen=True, slots=True)
class _Unsent:
    """A token that was expected at a position of the sequence, too unlikely to be drafted."""

    position: int
    token: int
    confidence: float


@dataclass(slots=True)
class _SuffixState:
    """One sequence: its own automaton, and its positions in the shared store."""

    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    positions: list[_StorePosition] = field(default_factory=list)
    unsent: _Unsent | None = None

    def read(self, seq: Sequence) -> None:
        """What the sequence has more than the automaton."""
        for token in seq.ids[self.own.num_read :]:
            self.own.append(token)


class Suffix(Drafter):
    """Drafts the likeliest continuation of the longest suffix that occurred before.

    least     the probability a path needs, by the automaton's own counts, to be drafted
    remember  megabytes of a memory that all sequences share; 0: every sequence knows only itself
    """

    needs = frozenset({Capability.TREE})
    looks_up = True

    def __init__(self, least: float = 0.02, remember: float = 0) -> None:
        if not 0 < least < 1:
            raise OptionError(f"suffix: least must lie between 0 and 1, not {least}")
        if remember < 0:
            raise OptionError(f"suffix: remember is a number of megabytes, not {remember}")
        self.least = least
        self._store = OutputStore(int(remember * MEGABYTE)) if remember else None
        self._states: dict[int, _SuffixState] = {}
        self._value: DraftValue | None = None
        self._source = ""  # its name where drafts are weighed
        self._bounds, self._bounds_used = ForecastBounds(least), BOUNDS_EVERY

    def use_value(self, value: DraftValue, source: str = "") -> None:
        self._value, self._source = value, source

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        """The prompt is read now: where the target is on a GPU, it is still busy with it."""
        state = self._states[seq.seq_id] = _SuffixState()
        if seq.params.num_draft_tokens != 0:
            state.read(seq)

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        return [self.forecast(seq, k).tree for seq, k in zip(seqs, num_draft_tokens)]

    def end(self, seq: Sequence) -> None:
        if self._states.pop(seq.seq_id, None) is not None and self._store is not None:
            self._store.add(seq.generated)

    def forecast(self, seq: Sequence, num_draft_tokens: int) -> Forecast:
        """The draft tree of a sequence and its expected accepted tokens. Depends only on the tokens before it."""
        if num_draft_tokens == 0:
            return NOTHING
        state = self._states.get(seq.seq_id)
        if state is None:
            state = self._states[seq.seq_id] = _SuffixState()
        state.read(seq)
        if state.unsent is not None:
            self._learn(seq, state)
        context = state.own.repeated()
        if self._store is None and not context.length:
            return NOTHING
        bounds = self._bounds_for(seq)
        own = state.own.forecast(context, num_draft_tokens, bounds)
        if own.unlikely is not None:
            state.unsent = _Unsent(len(seq.ids), *own.unlikely)
        if self._store is None:
            return own
        forecasts = [own]
        for position in self._positions(state, seq.ids):
            forecasts.append(position.automaton.forecast(position.context, num_draft_tokens, bounds))
        return max(forecasts, key=lambda forecast: forecast.expected)

    def _bounds_for(self, seq: Sequence) -> ForecastBounds:
        """Where drafts are weighed, none is made whose first node would not be sent: most steps have no other."""
        if self._value is None:
            return self._bounds
        if seq.params.num_draft_tokens is not None:  # as many as the client asked for
            return ForecastBounds(max(self.least, WORTH_TRYING * self._value.least_survival()))
        self._bounds_used += 1
        if self._bounds_used > BOUNDS_EVERY:  # what draft tokens cost changes slowly, and asking takes a while
            needed, table = self._value.least_survival(), self._value.record(seq, self._source).table
            self._bounds = ForecastBounds(max(self.least, WORTH_TRYING * needed), table.least_confidence(needed))
            self._bounds_used = 0
        return self._bounds

    def _learn(self, seq: Sequence, state: _SuffixState) -> None:
        """What was not worth drafting teaches what its confidence means all the same, or it would never be again."""
        unsent, state.unsent = state.unsent, None
        if unsent is not None and self._value is not None and unsent.position < len(seq.ids):
            is_right = seq.ids[unsent.position] == unsent.token
            self._value.record(seq, self._source).table.observe(unsent.confidence, is_right)

    def _positions(self, state: _SuffixState, ids: list[int]) -> list[_StorePosition]:
        """The positions of a sequence in the automata of the store, brought up to date."""
        automata = self._store.automata if self._store is not None else []
        earlier = {id(position.automaton): position for position in state.positions}
        start = max(0, len(ids) - LOOKBACK)
        state.positions = [
            earlier.get(id(automaton)) or _StorePosition(automaton, Context(), start) for automaton in automata
        ]
        for position in state.positions:
            for token in ids[position.num_read :]:
                position.context = position.automaton.follow(position.context, token)
            position.num_read = len(ids)
        return state.positions


def build(context: DrafterContext) -> Suffix:
    return Suffix(**context.options)


SPEC = DrafterSpec(
    name="suffix",
    summary="the longest repeated suffix of the sequence predicts its likeliest continuations",
    weights=WeightsNeeded.NONE,
    build=build,
    options=options_of(Suffix),
    reference="SuffixDecoding, https://arxiv.org/abs/2411.04975",
    takes_draft_model=False,
)
