"""A suffix automaton that grows token by token and counts what it has read.

A state represents the runs of tokens that have ended at the same positions so far. Its link leads to a shorter context
that ended at these positions and more. Reading a token costs O(1), amortised, and creates at most two states.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from typing import NamedTuple

import torch

from paceline.core.draft_tree import ROOT, DraftTree, empty

START = 0  # the state of the empty run
MAX_COUNTED = 16  # links followed to count an occurrence: the cost of a token stays bounded
CONTEXTS = 4  # contexts of falling length that predict the next token
SUCCESSORS = 32  # of one context that are considered; a context with more predicts little
SINGLE_WEIGHT = 0.5  # the length that a context of one token counts for: a third of what follows one is accepted
BYTES_PER_STATE = 480  # measured: a dictionary of successors and its numbers


@dataclass(frozen=True, slots=True)
class Context:
    """The longest suffix of a sequence that an automaton has read: its state and its length."""

    state: int = START
    length: int = 0


@dataclass(frozen=True, slots=True)
class ForecastBounds:
    """How likely a node must be.

    least  the probability that a path needs to be drafted
    first  the probability that the likeliest first node needs: below it no tree is worth making
    """

    least: float
    first: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Forecast:
    """Likely continuations as a tree, and the number of its tokens expected to be accepted.

    unlikely  the likeliest next token and its probability, where that is too low for a tree
    """

    tree: DraftTree
    expected: float
    unlikely: tuple[int, float] | None = None


NOTHING = Forecast(empty(), 0.0)


class _Candidate(NamedTuple):
    """A node that may join the tree. The likeliest comes first, and of equally likely ones the latest: as tuples they
    compare in that order, which a heap does many times a step."""

    unlikelihood: float  # the probability of the whole path, negated
    age: int  # when its run last ended, negated
    parent: int
    token: int
    state: int
    length: int  # of the context that it leads to, with the state


class SuffixAutomaton:
    """All runs of tokens read so far. Several sequences may be read one after another."""

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int] = [-1]
        self._length: list[int] = [0]
        self._count: list[int] = [0]  # times a state's runs have ended somewhere
        self._latest: list[int] = [0]  # when they last did
        self._last = START
        self.num_read = 0  # tokens

    @property
    def memory(self) -> int:
        """Bytes, roughly."""
        return BYTES_PER_STATE * len(self._next)

    def start_sequence(self) -> None:
        """The next token does not continue the tokens before it."""
        self._last = START

    def append(self, token: int) -> None:
        """Read one token."""
        self.num_read += 1
        child = self._next[self._last].get(token)
        if child is None:
            self._last = self._extend(token)
        else:  # only when a later sequence repeats an earlier one
            self._last = self._exact_child(self._last, token, child)
        self._count_end(self._last)

    def repeated(self) -> Context:
        """The longest suffix that has occurred before."""
        state = self._link[self._last]
        return Context(state, self._length[state]) if state > START else Context()

    def follow(self, context: Context, token: int) -> Context:
        """The longest context after one more token; shorter at the front where the token never followed it."""
        state, length = context.state, context.length
        while state != START and self._length[self._link[state]] >= length:
            state = self._link[state]  # the state was split: move to the part of this length
        while token not in self._next[state]:
            if state == START:
                return Context()
            state = self._link[state]
            length = self._length[state]
        return Context(self._next[state][token], length + 1)

    def forecast(self, context: Context, limit: int, bounds: ForecastBounds) -> Forecast:
        """The likeliest continuations of a context within the bounds, likeliest nodes first: at most `limit`."""
        candidates, least = list[_Candidate](), bounds.least
        self._push(candidates, context.state, context.length, 1.0, ROOT, least)
        if not candidates or not limit:
            return NOTHING
        first = candidates[0]
        if -first.unlikelihood < bounds.first:
            return Forecast(NOTHING.tree, 0.0, (first.token, -first.unlikelihood))
        nodes: list[_Candidate] = []
        while candidates and len(nodes) < limit:
            best = heappop(candidates)
            nodes.append(best)
            if len(nodes) < limit:
                self._push(candidates, best.state, best.length, -best.unlikelihood, len(nodes) - 1, least)
        confidence = [
            -node.unlikelihood if node.parent == ROOT else node.unlikelihood / nodes[node.parent].unlikelihood
            for node in nodes
        ]
        tokens = torch.tensor([node.token for node in nodes], dtype=torch.int64)
        tree = DraftTree(tokens, [node.parent for node in nodes], confidence=confidence)
        return Forecast(tree, -sum([node.unlikelihood for node in nodes]))

    # --- what comes next ----------------------------------------------------------------------------------------------

    def _push(
        self, candidates: list[_Candidate], state: int, length: int, probability: float, parent: int, least: float
    ) -> None:
        """Queue what followed a context, if it is likely enough. probability: of the path to the parent.

        By prediction with partial matches: each shorter context gets the probability the longer one escapes with. Long
        contexts escape less than short ones, steady ones less than those that vary.
        """
        counts, remaining = self._count, probability
        seen: set[int] = set()
        for _ in range(CONTEXTS):
            if state <= START or remaining < least:
                return
            new = list(islice(self._next[state].items(), SUCCESSORS))
            if seen:
                new = [pair for pair in new if pair[0] not in seen]
            total = sum([counts[child] for _, child in new])
            if total:
                escape = len(new) / (len(new) + total * (length if length > 1 else SINGLE_WEIGHT))
                each = remaining * (1 - escape) / total
                for token, child in new:
                    own = each * counts[child]
                    if own >= least:
                        heappush(candidates, _Candidate(-own, -self._latest[child], parent, token, child, length + 1))
                remaining *= escape
                if remaining < least:
                    return
                seen.update([token for token, _ in new])
            state = self._link[state]
            length = self._length[state]

    # --- growing ------------------------------------------------------------------------------------------------------

    def _extend(self, token: int) -> int:
        """A new state for the whole sequence with this token; every suffix that had no such successor gets it."""
        new = self._add_state(self._length[self._last] + 1, {}, START)
        state = self._last
        while state != -1 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state != -1:
            self._link[new] = self._exact_child(state, token, self._next[state][token])
        return new

    def _exact_child(self, state: int, token: int, child: int) -> int:
        """The state of the run of `state` and then `token`: the child, or its shorter part, split off."""
        if self._length[child] == self._length[state] + 1:
            return child
        split = self._add_state(self._length[state] + 1, dict(self._next[child]), self._link[child])
        self._count[split], self._latest[split] = self._count[child], self._latest[child]
        self._link[child] = split
        while state != -1 and self._next[state].get(token) == child:
            self._next[state][token] = split
            state = self._link[state]
        return split

    def _add_state(self, length: int, successors: dict[int, int], link: int) -> int:
        self._next.append(successors)
        self._link.append(link)
        self._length.append(length)
        self._count.append(0)
        self._latest.append(0)
        return len(self._next) - 1

    def _count_end(self, state: int) -> None:
        """Count an occurrence that ends here for the state and its shorter contexts."""
        for _ in range(MAX_COUNTED):
            if state <= START:
                return
            self._count[state] += 1
            self._latest[state] = self.num_read
            state = self._link[state]
