"""Lookahead: the target drafts for itself by running ahead of its own sequence in every pass.

Beside the draft tokens a pass reads a window of tokens that do not exist yet. Each of its columns is a short trajectory
that every pass refines (Jacobi iteration): the target reads the column and adds one token to it, the oldest one falls
off. The tokens of a column and the added one are an n-gram the target may generate: it goes into a pool, keyed by its
first token, and n-grams that start with the last token of the sequence become draft tokens.

The window, `columns` wide and `run - 1` deep, forms a tree, so an ordinary tree pass reads it:

    sequence ── o ── o ── o ── o      level 0 is a chain: a column sees the first tokens of all columns left of it
      │         │    │    │    │
      o         o    o    o    o      a column continues below its first token
      │         │    │    │    │
      o         o    o    o    o  ──> the target's argmax here is the next token of the column

Its nodes are `probes`: they are never accepted, so the output stays exact whatever they hold. There is no second model
and no training; the cost is a wide pass, which is nearly free where memory bandwidth is the bottleneck.
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
from paceline.drafting.registry import DrafterContext, DrafterSpec, WeightsNeeded, options_of
from paceline.errors import OptionError

FILL_STRIDE = 7919  # a prime: the window is filled with tokens far apart in the sequence, not with a copy of a passage


class NgramPool:
    """N-grams the target may generate, by their first token; the latest few of each."""

    def __init__(self, max_per_token: int) -> None:
        self._max_per_token = max_per_token
        self._continuations: dict[int, dict[tuple[int, ...], None]] = {}  # a dictionary keeps order and has no doubles

    def add(self, ngram: list[int]) -> None:
        """Store what may follow ngram[0]."""
        continuations = self._continuations.setdefault(ngram[0], {})
        rest = tuple(ngram[1:])
        continuations.pop(rest, None)
        continuations[rest] = None
        while len(continuations) > self._max_per_token:
            del continuations[next(iter(continuations))]

    def after(self, token: int) -> Iterator[tuple[int, ...]]:
        """What may follow, latest first."""
        return reversed(self._continuations.get(token, {}))


@dataclass(slots=True)
class LookaheadWindow:
    """How far the target has run ahead of one sequence."""

    pool: NgramPool
    columns: list[list[int]] = field(default_factory=list)  # column 0 starts with the last token of the sequence
    num_read: int = 0  # tokens of the sequence that are in the pool
    num_filled: int = 0  # tokens taken to fill the window
    tree: DraftTree | None = None  # the tree of this step that holds the window


class Lookahead(Drafter):
    """Drafts from a pool that the target fills while it generates.

    columns  how far ahead the window reaches
    run      tokens of an n-gram; the window is run - 1 levels deep
    kept     n-grams stored for each first token
    window   False: no window, only n-grams of the sequence itself; the difference is what the window contributes
    """

    needs = frozenset({Capability.TREE})

    def __init__(self, columns: int = 12, run: int = 5, kept: int = 8, window: bool = True) -> None:
        if columns < 1 or run < 3 or kept < 1:
            raise OptionError("lookahead needs at least one column, runs of 3 tokens or more, and one of them kept")
        self.columns, self.run, self.kept, self.window = columns, run, kept, window
        self._windows: dict[int, LookaheadWindow] = {}

    @property
    def probes(self) -> int:
        """Tokens the window of a sequence adds to a pass."""
        return self.columns * (self.run - 1) - 1 if self.window else 0

    def begin(self, seq: Sequence, prompt: RowOutput | None) -> None:
        self._windows[seq.seq_id] = LookaheadWindow(NgramPool(self.kept))

    def propose(self, seqs: list[Sequence], num_draft_tokens: list[int]) -> list[DraftTree]:
        return [self._draft(seq, k) for seq, k in zip(seqs, num_draft_tokens)]

    def observe(self, seqs: list[Sequence], results: list[StepResult]) -> None:
        for seq, result in zip(seqs, results):
            window = self._windows.get(seq.seq_id)
            if window is not None and window.columns:
                self._refine(window, result)

    def end(self, seq: Sequence) -> None:
        self._windows.pop(seq.seq_id, None)

    def _draft(self, seq: Sequence, num_draft_tokens: int) -> DraftTree:
        window = self._windows.setdefault(seq.seq_id, LookaheadWindow(NgramPool(self.kept)))
        window.tree = None
        if not num_draft_tokens:
            return draft_tree.empty()
        self._read(window, seq.ids)
        tree = draft_tree.merge(window.pool.after(seq.ids[-1]), num_draft_tokens)
        # Close to the end the window would reach past max_seq_len, and its n-grams would come too late.
        if not self.window or seq.remaining_tokens < self.columns + self.run:
            return tree
        self._fill(window, seq.ids)
        window.tree = _with_window(tree, window.columns)
        return window.tree

    def _read(self, window: LookaheadWindow, ids: list[int]) -> None:
        """Add the n-grams of the sequence itself to the pool: they may occur again."""
        for end in range(max(window.num_read + 1, self.run), len(ids) + 1):
            window.pool.add(ids[end - self.run : end])
        window.num_read = len(ids)

    def _fill(self, window: LookaheadWindow, ids: list[int]) -> None:
        """Complete the window: a new column starts at the second token of the one before and continues with the pool,
        or with any tokens of the sequence. Jacobi iteration starts from anything."""
        while len(window.columns) < self.columns:
            column = [window.columns[-1][1]] if window.columns else [ids[-1]]
            column += next(window.pool.after(column[-1]), ())[: self.run - 2]
            while len(column) < self.run - 1:
                window.num_filled += 1
                column.append(ids[window.num_filled * FILL_STRIDE % len(ids)])
            window.columns.append(column)
        window.columns[0][0] = ids[-1]

    def _refine(self, window: LookaheadWindow, result: StepResult) -> None:
        """Add the target's next token to each column and drop its oldest; the window advances with the sequence."""
        if result.tree is not window.tree:  # a step without this window: its columns stay, fewer of them
            del window.columns[: len(result.emitted)]
            return
        first = result.tree.num_draft_tokens + 1
        ends = torch.tensor([first + node for node in _column_ends(window.columns)], device=result.output.logits.device)
        next_tokens = result.output.logits[ends].argmax(dim=-1).tolist()
        for column, token in zip(window.columns, next_tokens):
            column.append(token)
            window.pool.add(column)
            del column[0]
        # Every column has advanced by one token, the sequence by all emitted ones.
        del window.columns[: len(result.emitted) - 1]


def _with_window(tree: DraftTree, columns: list[list[int]]) -> DraftTree:
    """The draft tokens and after them the window: column by column, each below the first token of the one before."""
    first = len(tree)
    tokens: list[int] = []
    parents: list[int] = []
    column_head = ROOT  # the first token of column 0 is the last token of the sequence
    for index, column in enumerate(columns):
        parent = column_head
        for token in column[1:] if index == 0 else column:
            tokens.append(token)
            parents.append(parent)
            parent = first + len(tokens) - 1
        column_head = ROOT if index == 0 else parent - len(column) + 1
    window = torch.tensor(tokens, dtype=torch.int64)
    return DraftTree(torch.cat([tree.tokens, window]), tree.parents + parents, probes=len(tokens))


def _column_ends(columns: list[list[int]]) -> list[int]:
    """The node of the window at the end of each column."""
    ends: list[int] = []
    count = -1  # the first token of column 0 is not a node
    for column in columns:
        count += len(column)
        ends.append(count - 1)
    return ends


def build(context: DrafterContext) -> Lookahead:
    return Lookahead(**context.options)


SPEC = DrafterSpec(
    name="lookahead",
    summary="the target runs ahead of its own sequence (Jacobi iteration) and drafts from what it finds",
    weights=WeightsNeeded.NONE,
    build=build,
    options=options_of(Lookahead),
    reference="Lookahead Decoding, https://arxiv.org/abs/2402.02057",
    takes_draft_model=False,
)
