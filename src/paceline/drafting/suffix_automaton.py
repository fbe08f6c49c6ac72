"""A suffix automaton that grows token by token and counts what it has read.

Every state stands for the runs of tokens that have ended in the same places so far. A state's link leads to the same
places and more: a shorter context that was seen more often. Reading a token costs O(1), amortised; at most two states
a token are ever made.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice

import torch

from paceline.core.draft_tree import ROOT, DraftTree

START = 0  # the state of the empty run
CREDITED = 16  # links followed to count an occurrence: contexts shorter than that many steps fade, cost stays bounded
CONTEXTS = 4  # contexts of falling length that vote on what comes next
SUCCESSORS = 32  # of one context that are looked at; one that has more says little
BYTES_A_STATE = 480  # measured: a dictionary of successors and its numbers


@dataclass(frozen=True, slots=True)
class Context:
    """The longest run at the end of a sequence that an automaton knows: its state and its length."""

    state: int = START
    length: int = 0


@dataclass(frozen=True, slots=True)
class Likely:
    """A token that may follow a context: how likely, how lately seen, and the context it leads to."""

    token: int
    uniforms: float
    latest: int
    context: Context


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """Likely continuations as a tree, and the number of its tokens that are expected to stand."""

    tree: DraftTree
    expected: float


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A node that may join the tree. The likeliest goes first, and of equally likely ones the one seen last."""

    uniforms: float
    parent: int
    found: Likely

    def __lt__(self, other: _Waiting) -> bool:
        return (self.uniforms, self.found.latest) > (other.uniforms, other.found.latest)


class SuffixAutomaton:
    """All runs of tokens read so far. Several sequences may be read one after another."""

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        self._length: list[int] = [0]
        self._count: list[int] = [0]  # times a state's runs have ended somewhere
        self._latest: list[int] = [0]  # when they last did
        self._last = START
        self.read = 0  # tokens

    @property
    def memory(self) -> int:
        """Bytes, roughly."""
        return BYTES_A_STATE * len(self._next)

    def start_text(self) -> None:
        """What is read from now on does not continue what was read before."""
        self._last = START

    def append(self, token: int) -> None:
        """Read one token."""
        self.read += 1
        known = self._next[self._last].get(token)
        if known is None:
            self._last = self._grow(token)
        else:  # only when a later sequence runs along an earlier one
            self._last = self._exactly(self._last, token, known)
        self._credit(self._last)

    def repeated(self) -> Context:
        """The longest run that ends here and had also ended somewhere before."""
        state = self._link[self._last]
        return Context(state, self._length[state]) if state > START else Context()

    def follow(self, context: Context, token: int) -> Context:
        """The longest known run after one more token; drops from the front of it what was never followed so."""
        state, length = context.state, context.length
        while state != START and self._length[self._link[state]] >= length:
            state = self._link[state]  # the state was split since: move to the part that holds this length
        while token not in self._next[state]:
            if state == START:
                return Context()
            state = self._link[state]
            length = self._length[state]
        return Context(self._next[state][token], length + 1)

    def forecast(self, context: Context, limit: int, least: float) -> Forecast:
        """The likeliest continuations of a context, likeliest nodes first: at most `limit`, none below `least`."""
        tokens: list[int] = []
        parents: list[int] = []
        expected = 0.0
        waiting: list[_Waiting] = []
        self._offer(waiting, context, 1.0, ROOT, least)
        while waiting and len(tokens) < limit:
            best = heappop(waiting)
            expected += best.uniforms
            tokens.append(best.found.token)
            parents.append(best.parent)
            self._offer(waiting, best.found.context, best.uniforms, len(tokens) - 1, least)
        return Forecast(DraftTree(torch.tensor(tokens, dtype=torch.int64), parents), expected)

    # --- what comes next ----------------------------------------------------------------------------------------------

    def _offer(self, waiting: list[_Waiting], context: Context, reached: float, node: int, least: float) -> None:
        """Queue the successors of a node that are likely enough."""
        for found in self._successors(context, least / reached):
            heappush(waiting, _Waiting(reached * found.uniforms, node, found))

    def _successors(self, context: Context, least: float) -> Iterator[Likely]:
        """What followed a context, by prediction with partial matches: each shorter context gets the doubt of the
        longer one. A long context is trusted more than a short one, a steady one more than one that varies."""
        state, length, left = context.state, context.length, 1.0
        seen: set[int] = set()
        for _ in range(CONTEXTS):
            if state <= START or left < least:
                return
            fresh = [pair for pair in islice(self._next[state].items(), SUCCESSORS) if pair[0] not in seen]
            total = sum(self._count[child] for _, child in fresh)
            if total:
                doubt = len(fresh) / (len(fresh) + total * length)
                for token, child in fresh:
                    uniforms = left * (1 - doubt) * self._count[child] / total
                    if uniforms >= least:
                        yield Likely(token, uniforms, self._latest[child], Context(child, length + 1))
                seen.update(token for token, _ in fresh)
                left *= doubt
            state = self._link[state]
            length = self._length[state]

    # --- growing ------------------------------------------------------------------------------------------------------

    def _grow(self, token: int) -> int:
        """A new state for the whole sequence with this token; every suffix that could not go on with it now can."""
        fresh = self._state(self._length[self._last] + 1, {}, START)
        state = self._last
        while state != -1 and token not in self._next[state]:
            self._next[state][token] = fresh
            state = self._link[state]
        if state != -1:
            self._link[fresh] = self._exactly(state, token, self._next[state][token])
        return fresh

    def _exactly(self, state: int, token: int, child: int) -> int:
        """The state of the run of `state` and then `token`: the child, or its shorter part, split off."""
        if self._length[child] == self._length[state] + 1:
            return child
        split = self._state(self._length[state] + 1, dict(self._next[child]), self._link[child])
        self._count[split], self._latest[split] = self._count[child], self._latest[child]
        self._link[child] = split
        while state != -1 and self._next[state].get(token) == child:
            self._next[state][token] = split
            state = self._link[state]
        return split

    def _state(self, length: int, successors: dict[int, int], link: int) -> int:
        self._next.append(successors)
        self._link.append(link)
        self._length.append(length)
        self._count.append(0)
        self._latest.append(0)
        return len(self._next) - 1

    def _credit(self, state: int) -> None:
        """Count an end here for the state and the contexts inside it."""
        for _ in range(CREDITED):
            if state <= START:
                return
            self._count[state] += 1
            self._latest[state] = self.read
            state = self._link[state]
