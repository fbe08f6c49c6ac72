"""Suffix lookup: the longest run that has just been said and was said before, however long, tells what comes next.

Every sequence has a suffix automaton over its prompt and what was written. It counts, so a draft token is not one earlier
continuation but the likeliest tree of them, and its size follows from the counts: a steady repetition is drafted as a
long chain, a place where the sequence has gone on in several ways as a few branches, and where nothing is likely nothing
is guessed. A token costs O(1), amortised.

`remember` gives all sequences a common memory of that many megabytes, over what was written before. It is off unless asked
for: draft tokens never change what a sequence says, but how fast it is said then depends on what others wrote.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core import draft_tree
from paceline.core.draft_tree import DraftTree
from paceline.core.protocols import Drafter
from paceline.core.sequence import Sequence
from paceline.core.types import Capability, RowOutput, StepResult
from paceline.drafting.suffix_automaton import Context, Forecast, SuffixAutomaton
from paceline.errors import OptionError

MEGABYTE = 1 << 20
RETRACED = 64  # tokens of a sequence that a store not met before is asked about


class Store:
    """What was written before, in at most `limit` bytes: two automata, of which the older is dropped when the younger
    is full. So the latest half of the memory is always there, and forgetting costs nothing."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.automata: list[SuffixAutomaton] = [SuffixAutomaton()]

    @property
    def memory(self) -> int:
        return sum(automaton.memory for automaton in self.automata)

    def add(self, tokens: list[int]) -> None:
        """Remember a finished sequence."""
        self.automata[-1].start_text()
        for token in tokens:
            if 2 * self.automata[-1].memory >= self._limit:
                self.automata = [self.automata[-1], SuffixAutomaton()]
            self.automata[-1].append(token)


@dataclass(slots=True)
class _Place:
    """Where in one automaton of the store a sequence stands, after `read` of its tokens."""

    automaton: SuffixAutomaton
    context: Context
    read: int


@dataclass(slots=True)
class _Memory:
    """What is known for one sequence: its own automaton, and its places in the common store."""

    own: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    places: list[_Place] = field(default_factory=list)


class Suffix(Drafter):
    """DraftOutput the likeliest continuation of the longest run that was seen before.

    least     a draft token is made only if its path is at least this likely, by the automaton's own counts
    remember  megabytes of a memory that all sequences share; 0: every sequence knows only itself
    """

    needs: frozenset[Capability] = frozenset({Capability.TREE})

    def __init__(self, least: float = 0.02, remember: float = 0) -> None:
        if not 0 < least < 1:
            raise OptionError(f"suffix: least must lie between 0 and 1, not {least}")
        if remember < 0:
            raise OptionError(f"suffix: remember is a number of megabytes, not {remember}")
        self.least = least
        self._store = Store(int(remember * MEGABYTE)) if remember else None
        self._texts: dict[int, _Memory] = {}

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        self._texts[seq.seq_id] = _Memory()

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        return [self.forecast(seq, budget).tree for seq, budget in zip(seqs, num_draft_tokens)]

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        pass

    def end(self, seq: Sequence) -> None:
        if self._texts.pop(seq.seq_id, None) is not None and self._store is not None:
            self._store.add(seq.generated)

    def forecast(self, seq: Sequence, budget: int) -> Forecast:
        """The draft tokens for a sequence, and how many of them are expected to stand. Depends on what is written, only."""
        if budget == 0:
            return Forecast(draft_tree.empty(), 0.0)
        memory = self._texts.setdefault(seq.seq_id, _Memory())
        for token in seq.ids[memory.own.read :]:
            memory.own.append(token)
        found = [memory.own.forecast(memory.own.repeated(), budget, self.least)]
        for place in self._places(memory, seq.ids):
            found.append(place.automaton.forecast(place.context, budget, self.least))
        return max(found, key=lambda forecast: forecast.expected)

    def _places(self, memory: _Memory, ids: list[int]) -> list[_Place]:
        """Where the sequence stands in each automaton of the store, brought up to date."""
        automata = self._store.automata if self._store is not None else []
        known = {id(place.automaton): place for place in memory.places}
        start = max(0, len(ids) - RETRACED)
        memory.places = [known.get(id(one)) or _Place(one, Context(), start) for one in automata]
        for place in memory.places:
            for token in ids[place.read :]:
                place.context = place.automaton.follow(place.context, token)
            place.read = len(ids)
        return memory.places
