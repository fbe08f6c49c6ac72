"""Lookahead: the target draft tokens for itself, by running ahead of its own sequence in every pass.

Beside the draft tokens a pass reads a window of tokens that are not there yet. Each column of it is a short trajectory that
is refined from pass to pass (Jacobi iteration): the target reads the column and adds one token to it, the oldest one
falls off. What a column held, and the token added, is a run of tokens the target might well say: it goes into a pool,
keyed by its first token, and runs that begin with the sequence's last token are put to the target as draft tokens.

The window, `columns` wide and `levels` deep, hangs together as a tree, so an ordinary tree pass reads it:

    sequence ── o ── o ── o ── o      level 0 is a chain: a column sees the first tokens of all columns left of it
      │     │    │    │    │
      o     o    o    o    o      a column goes down on its own
      │     │    │    │    │
      o     o    o    o    o  ──> the target's answer here is the column's next token

Its nodes are `probes`: they can never be accepted, so whatever stands in them the sequence stays exact. No second model,
no training; the price is a wide pass, which is nearly free where memory is the bottleneck and dear where it is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from paceline.core import draft_tree
from paceline.core.draft_tree import ROOT, DraftTree
from paceline.core.protocols import Drafter
from paceline.core.sequence import Sequence
from paceline.core.types import Capability, RowOutput, StepResult
from paceline.errors import OptionError

STRIDE = 7919  # a prime; filling steps through the sequence with it, so neighbours in a window are strangers in the sequence


class Pool:
    """Runs of tokens the target might say, by the token they follow; the latest few of each."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._runs: dict[int, dict[tuple[int, ...], None]] = {}  # a dictionary keeps order and knows what it holds

    def add(self, run: list[int]) -> None:
        """Remember what may follow run[0]."""
        known = self._runs.setdefault(run[0], {})
        rest = tuple(run[1:])
        known.pop(rest, None)
        known[rest] = None
        while len(known) > self._kept:
            del known[next(iter(known))]

    def after(self, token: int) -> Iterator[tuple[int, ...]]:
        """What may follow, latest first."""
        return reversed(self._runs.get(token, {}))


@dataclass(slots=True)
class _Ahead:
    """How far ahead of one sequence the target has run."""

    pool: Pool
    columns: list[list[int]] = field(default_factory=list)  # column 0 begins with the sequence's last token
    read: int = 0  # tokens of the sequence that are in the pool
    filled: int = 0  # tokens taken to fill the window
    tree: DraftTree | None = None  # the one with the window of this step


class Lookahead(Drafter):
    """DraftOutput from a pool that the target fills while it writes.

    columns  how far ahead the window reaches
    run      tokens of a run in the pool; the window is run - 1 levels deep
    kept     runs remembered for each first token
    window   False: no window, only runs of the sequence itself; what it then lacks is what the window brings
    """

    needs: frozenset[Capability] = frozenset({Capability.TREE})

    def __init__(self, columns: int = 12, run: int = 5, kept: int = 8, window: bool = True) -> None:
        if columns < 1 or run < 3 or kept < 1:
            raise OptionError("lookahead needs at least one column, runs of 3 tokens or more, and one of them kept")
        self.columns, self.run, self.kept, self.window = columns, run, kept, window
        self._texts: dict[int, _Ahead] = {}

    @property
    def probes(self) -> int:
        """Tokens a sequence's window adds to a pass that draft tokens."""
        return self.columns * (self.run - 1) - 1 if self.window else 0

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        self._texts[seq.seq_id] = _Ahead(Pool(self.kept))

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        return [self._guess(seq, budget) for seq, budget in zip(seqs, num_draft_tokens)]

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        for seq, result in zip(seqs, results):
            ahead = self._texts.get(seq.seq_id)
            if ahead is not None and ahead.columns:
                self._refine(ahead, result)

    def end(self, seq: Sequence) -> None:
        self._texts.pop(seq.seq_id, None)

    def _guess(self, seq: Sequence, budget: int) -> DraftTree:
        ahead = self._texts.setdefault(seq.seq_id, _Ahead(Pool(self.kept)))
        ahead.tree = None
        if not budget:
            return draft_tree.empty()
        self._read(ahead, seq.ids)
        draft_tokens = draft_tree.merge(ahead.pool.after(seq.ids[-1]), budget)
        # Close to the end the window would reach past the longest sequence, and what it finds would come too late.
        if not self.window or seq.remaining_tokens < self.columns + self.run:
            return draft_tokens
        self._fill(ahead, seq.ids)
        ahead.tree = _with_window(draft_tokens, ahead.columns)
        return ahead.tree

    def _read(self, ahead: _Ahead, ids: list[int]) -> None:
        """The sequence's own runs belong to the pool too: what was said may be said again."""
        for end in range(max(ahead.read + 1, self.run), len(ids) + 1):
            ahead.pool.add(ids[end - self.run : end])
        ahead.read = len(ids)

    def _fill(self, ahead: _Ahead, ids: list[int]) -> None:
        """Complete the window: a column that is new goes on where the pool leads from the one before, or begins with
        any token of the sequence. Jacobi iteration starts from anything."""
        while len(ahead.columns) < self.columns:
            column = [ahead.columns[-1][1]] if ahead.columns else [ids[-1]]
            column += next(ahead.pool.after(column[-1]), ())[: self.run - 2]
            while len(column) < self.run - 1:
                ahead.filled += 1
                column.append(ids[ahead.filled * STRIDE % len(ids)])
            ahead.columns.append(column)
        ahead.columns[0][0] = ids[-1]

    def _refine(self, ahead: _Ahead, result: StepResult) -> None:
        """Each column gets the target's next token and loses its oldest; the window moves on with the sequence."""
        if result.tree is not ahead.tree:  # a step without our window: columns stay as they are, fewer of them
            del ahead.columns[: len(result.emitted)]
            return
        first = result.tree.num_draft_tokens + 1
        ends = torch.tensor([first + node for node in _column_ends(ahead.columns)], device=result.output.logits.device)
        answers = result.output.logits[ends].argmax(dim=-1).tolist()
        for column, answer in zip(ahead.columns, answers):
            column.append(answer)
            ahead.pool.add(column)
            del column[0]
        # Every column has moved on by one token, the sequence by all that were emitted.
        del ahead.columns[: len(result.emitted) - 1]


def _with_window(draft_tokens: DraftTree, columns: list[list[int]]) -> DraftTree:
    """The draft tokens, and behind them the window: column after column, each hung below the head of the one before."""
    first = len(draft_tokens)
    tokens: list[int] = []
    parents: list[int] = []
    head = ROOT  # the head of the first column is the sequence's last token
    for seq_id, column in enumerate(columns):
        above = head
        for token in column[1:] if seq_id == 0 else column:
            tokens.append(token)
            parents.append(above)
            above = first + len(tokens) - 1
        head = ROOT if seq_id == 0 else above - len(column) + 1
    window = torch.tensor(tokens, dtype=torch.int64)
    return DraftTree(torch.cat([draft_tokens.tokens, window]), draft_tokens.parents + parents, probes=len(tokens))


def _column_ends(columns: list[list[int]]) -> list[int]:
    """Which node of the window each column ends with."""
    ends: list[int] = []
    count = -1  # the head of the first column is no node
    for column in columns:
        count += len(column)
        ends.append(count - 1)
    return ends
